"""Runs a decode worker: `python -m decode_svc --port 0 --model PATH`."""

import asyncio
import sys

from common.config import load_or_exit
from common.errors import TwostrokeError
from common.logs import setup_logging
from common.pb import worker_pb2
from common.worker import run_worker
from decode_svc.config import DecodeSettings
from decode_svc.service import DecodeService


def main() -> int:
    settings = load_or_exit(DecodeSettings, sys.argv[1:])
    setup_logging("decode", settings.log_level)
    try:
        asyncio.run(run_worker(settings, worker_pb2.ROLE_DECODE, lambda parts: DecodeService(settings, parts)))
    except TwostrokeError as error:
        sys.stderr.write(f"{settings.program}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
