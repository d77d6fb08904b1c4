"""What an operator does with workers: look at them, and take one out of service."""

from common.errors import LastWorker, UnknownWorker
from gateway.placement import Role
from gateway.quote import quote
from gateway.registry import Registry
from gateway.wire_json import Json
from gateway.worker import Worker

DRAIN_TIMEOUT_S = 5.0


class RegistryFleet:
    """Implements `services.Fleet` over the workers that are configured."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def describe(self) -> list[Json]:
        """Every worker that is configured, whatever its state."""
        return [_worker_json(worker) for worker in self._registry.workers()]

    async def drain(self, name: str, *, force: bool) -> Json:
        """Tells the worker (its id or its address) to take nothing new, end what it has, and exit.

        Returns its description with `grace_s`, within which it will be gone. Raises UnknownWorker; PeerLost when it
        cannot be reached; without `force` LastWorker when every request would be refused until another is there.
        """
        worker = self._find(name)
        if not force and worker.role is Role.DECODE and not self._is_replaceable(worker):
            raise LastWorker(
                f"{worker.name} is the only decode worker that takes work: requests would be refused until another is "
                "ready; to do it all the same, force it"
            )
        grace_s = await worker.drain(DRAIN_TIMEOUT_S)
        return {**_worker_json(worker), "grace_s": grace_s}

    def _find(self, name: str) -> Worker:
        """Of several with this id (an address may be new after a restart) the one that is ready."""
        workers = self._registry.workers()
        found = [worker for worker in workers if name in (worker.info.worker_id, worker.address)]
        if not name or not found:
            known = ", ".join(sorted(worker.info.worker_id or worker.address for worker in workers)) or "none"
            raise UnknownWorker(f"there is no worker {quote(name)} here; known: {known}", param="worker")
        return max(found, key=lambda worker: worker.is_ready)

    def _is_replaceable(self, worker: Worker) -> bool:
        """Also where the worker takes no work: then nothing is lost by its end."""
        takes_work = [view.address for view in self._registry.views() if view.role is worker.role and view.takes_work]
        return takes_work != [worker.address]


def _worker_json(worker: Worker) -> Json:
    view = worker.view()
    return {
        "id": view.worker_id,
        "role": view.role.value,
        "address": view.address,
        "state": worker.state.value,
        "reason": worker.reason,
        "incarnation": worker.info.incarnation.hex(),
        "is_draining": view.is_draining,
        "num_sequences": view.num_sequences,
        "free_blocks": view.free_blocks,
        "total_blocks": view.total_blocks,
    }
