"""Runs a prefill worker: `python -m prefill_svc --port 0 --model PATH`."""

import asyncio
import sys

from common.config import load_or_exit
from common.errors import TwostrokeError
from common.logs import setup_logging
from common.pb import worker_pb2
from common.worker import run_worker
from prefill_svc.config import PrefillSettings
from prefill_svc.service import PrefillService


def main() -> int:
    settings = load_or_exit(PrefillSettings, sys.argv[1:])
    setup_logging("prefill", settings.log_level)
    try:
        asyncio.run(run_worker(settings, worker_pb2.ROLE_PREFILL, lambda parts: PrefillService(settings, parts)))
    except TwostrokeError as error:
        sys.stderr.write(f"{settings.program}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
