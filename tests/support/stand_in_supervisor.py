"""`twostroke up` with stand-ins for its services: argv is the FIFO, the port, and flags of the stand-in worker."""

import sys
from collections.abc import Iterator

from cli.__main__ import exit_code
from cli.local_stack import LocalStack
from cli.options import StackOptions
from cli.progress import Progress
from cli.served import ServedModel
from cli.stack import Service
from cli.topology import Topology
from tests.support.stand_ins import stand_in


def main() -> int:
    fifo, port, grace_s, *worker_flags = sys.argv[1:]

    def plan(options: StackOptions, ports: Iterator[int], progress: Progress) -> list[Service]:
        return [stand_in("worker", fifo, *worker_flags, stage=1), stand_in("gateway", fifo, stage=2)]

    async def identify(url: str) -> ServedModel:
        return ServedModel("stand-in", "reference", False, "it computes nothing")

    options = StackOptions(Topology(1, 1), "127.0.0.1", int(port), "", None, None, True, "", float(grace_s), 60.0)
    return exit_code(LocalStack(options, plan=plan, identify=identify).run)


if __name__ == "__main__":
    sys.exit(main())
