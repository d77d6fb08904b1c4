"""Time that passes when the test says so."""

import asyncio


class ManualTime:
    """`sleep` has asyncio.sleep's signature; sleepers wake in `advance`, in the order of their due times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self._arrived = asyncio.Condition()

    async def sleep(self, seconds: float) -> None:
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now_s + seconds, waker))
        async with self._arrived:
            self._arrived.notify_all()
        await waker

    async def until_asleep(self, due_s: float) -> None:
        """Returns once somebody sleeps until exactly `due_s`."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: any(due == due_s for due, _ in self._alive()))

    def advance(self, seconds: float) -> None:
        """Wakes whoever is due; they run when the test next waits."""
        self.now_s += seconds
        for due, waker in sorted(self._alive(), key=lambda sleeper: sleeper[0]):
            if due <= self.now_s:
                waker.set_result(None)

    def _alive(self) -> list[tuple[float, "asyncio.Future[None]"]]:
        self._sleepers = [(due, waker) for due, waker in self._sleepers if not waker.done()]
        return self._sleepers
