"""Runs the gateway: `python -m gateway --decode 127.0.0.1:7001 --prefill 127.0.0.1:7002`."""

import asyncio
import sys

from common.config import load_or_exit
from common.errors import TwostrokeError
from common.logs import setup_logging
from gateway.config import GatewaySettings
from gateway.service import run_gateway


def main() -> int:
    settings = load_or_exit(GatewaySettings, sys.argv[1:])
    setup_logging("gateway", settings.log_level)
    try:
        asyncio.run(run_gateway(settings))
    except TwostrokeError as error:
        sys.stderr.write(f"{settings.program}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
