"""What keeps a run from being reported: something that the report would imply did not happen. Pure."""

from collections.abc import Sequence
from enum import StrEnum

from bench.replay.record import Outcome, RequestRecord
from bench.replay.server_metrics import ServerChange


class State(StrEnum):
    """What the user calls the run."""

    WARM = "warm"
    COLD = "cold"


def refusals(
    records: Sequence[RequestRecord],
    warm_up: Sequence[RequestRecord],
    state: State,
    server: ServerChange | None,
    *,
    allows_errors: bool,
) -> list[str]:
    """Each says what did not happen and what to do; empty: the run may be reported."""
    found = [*_of_state(warm_up, state), *_of_records(records, allows_errors=allows_errors)]
    return found + (_of_server(server) if server is not None else [])


def _of_state(warm_up: Sequence[RequestRecord], state: State) -> list[str]:
    if state is State.COLD:
        return [f"the run is called cold, and {len(warm_up)} requests warmed it up"] if warm_up else []
    if not warm_up:
        return ["the run is called warm, and had no warm-up; give --warm-up, or call it --state cold"]
    num_failed = sum(record.outcome is not Outcome.COMPLETED for record in warm_up)
    return [f"the run is called warm, and {num_failed} of {len(warm_up)} warm-up requests failed"] if num_failed else []


def _of_records(records: Sequence[RequestRecord], *, allows_errors: bool) -> list[str]:
    failed = [record for record in records if record.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)]
    found = []
    if failed and not allows_errors:
        kinds = ", ".join(sorted({str(record.error) for record in failed}))
        found.append(f"{len(failed)} of {len(records)} requests failed ({kinds}); see to it, or give --allow-errors")
    if not any(record.outcome is Outcome.COMPLETED for record in records):
        found.append("no request completed")
    return found


def _of_server(server: ServerChange) -> list[str]:
    found = []
    if server.num_prefill_workers and server.kv_bytes_moved == 0:
        found.append(
            f"no KV moved although {server.num_prefill_workers} prefill workers exist: the run was not disaggregated"
        )
    if server.restarted:
        found.append(f"workers came, went or restarted during the run: {', '.join(server.restarted)}")
    return found
