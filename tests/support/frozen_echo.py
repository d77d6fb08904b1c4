"""A worker process that a test may freeze: serves health on a free port and prints its address."""

import asyncio

from common.rpc.server import WorkerServer


async def main() -> None:
    server = WorkerServer("127.0.0.1:0")
    await server.start()
    serving = asyncio.create_task(server.serve_until_stopped(nothing_to_drain, grace_s=1.0))
    await asyncio.sleep(0)  # until it listens for signals
    print(f"address={server.address}", flush=True)
    await serving


async def nothing_to_drain() -> None:
    pass


if __name__ == "__main__":
    asyncio.run(main())
