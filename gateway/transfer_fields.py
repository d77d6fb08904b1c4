"""What the services tell each other of a transfer, and a client never may: where its blocks go would be the client's.

Bodies need no look-up: a field that is no parameter is refused (`gateway.schemas`). Headers and queries are otherwise
read by name alone, so one that means to steer a transfer would be ignored; it is refused instead.
"""

from collections.abc import Iterable

from common.errors import BadRequest
from gateway.quote import quote

TRANSFER_FIELDS = frozenset(
    {
        "decode_address",
        "decode_worker",
        "prefill_worker",
        "placement",
        "ticket",
        "transfer_id",
        "fingerprint",
        "tenant_salt",
        "block_hashes",
        "num_held_blocks",
        # the same in other systems
        "kv_transfer_params",
        "prefiller_host_port",
        "prefiller_url",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    }
)


def refuse_transfer_fields(headers: Iterable[str], query: Iterable[str]) -> None:
    """Raises BadRequest, naming the header or the query parameter."""
    for where, names in (("header", headers), ("query parameter", query)):
        for name in names:
            if _plain(name) in TRANSFER_FIELDS:
                raise BadRequest(f"{where} {quote(name)} is not a client's to send: the server decides it", param=name)


def _plain(name: str) -> str:
    return name.lower().removeprefix("x-").removeprefix("twostroke-").replace("-", "_")
