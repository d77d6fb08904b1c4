"""Tickets: proof that this worker, in this incarnation, promised room for one transfer.

Signed (HMAC-SHA-256, cut to 16 bytes) with a key that is drawn at start, so a ticket can neither be forged nor outlive
the worker that issued it.
"""

import hmac
import secrets
from dataclasses import dataclass
from hashlib import sha256
from struct import Struct

from common.errors import UnknownTransfer
from common.ids import TransferId

_CLAIMS = Struct("<16sI")
_MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class TicketClaims:
    transfer_id: TransferId
    generation: int


class TicketAuthority:
    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def issue(self, claims: TicketClaims) -> bytes:
        body = _CLAIMS.pack(claims.transfer_id, claims.generation)
        return body + self._sign(body)

    def verify(self, ticket: bytes) -> TicketClaims:
        """Raises UnknownTransfer for a ticket that this start of this worker did not issue."""
        body, mac = ticket[: _CLAIMS.size], ticket[_CLAIMS.size :]
        if len(ticket) != _CLAIMS.size + _MAC_BYTES or not hmac.compare_digest(mac, self._sign(body)):
            raise UnknownTransfer("the ticket was not issued by this start of this decode worker; reserve again")
        transfer_id, generation = _CLAIMS.unpack(body)
        return TicketClaims(TransferId(transfer_id), generation)

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, sha256)[:_MAC_BYTES]
