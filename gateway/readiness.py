"""Whether there is a way to serve, and if not, why: what /readyz says."""

from gateway.admission import Admission
from gateway.discovery import Discovery
from gateway.placement import Role
from gateway.registry import Registry
from gateway.worker import WorkerState


class Readiness:
    """At the start every configured worker is waited for until it has answered or failed, so that the first request
    takes the planned way. After that one decode worker is enough, and where falling back is not allowed (`strict`) one
    prefill worker too.
    """

    def __init__(self, registry: Registry, discovery: Discovery, admission: Admission, *, needs_prefill: bool) -> None:
        self._registry = registry
        self._discovery = discovery
        self._admission = admission
        self._needs_prefill = needs_prefill
        self._was_ready = False

    def why_not_ready(self) -> str | None:
        """None: ready."""
        if self._admission.is_closed:
            return "the gateway is shutting down"
        workers = self._registry.workers()
        is_first_contact = any(worker.state is WorkerState.CONNECTING for worker in workers)
        able = {view.role for view in self._registry.views() if view.takes_work}
        needed = {Role.DECODE, Role.PREFILL} if self._needs_prefill else {Role.DECODE}
        missing = sorted(needed - able)
        if not missing and (self._was_ready or not is_first_contact):
            self._was_ready = True
            return None
        reasons = [*self._discovery.unresolved(), *self._registry.not_ready()]
        what = f"no {' and no '.join(missing)} worker is ready" if missing else "still meeting the workers"
        return "; ".join([what, *reasons])
