import pytest

from common.errors import UnknownTransfer
from common.ids import TransferId
from decode_svc.ticket import TicketAuthority, TicketClaims

CLAIMS = TicketClaims(TransferId(bytes(range(16))), 3)


def test_a_ticket_says_what_was_promised() -> None:
    authority = TicketAuthority()
    assert authority.verify(authority.issue(CLAIMS)) == CLAIMS


def test_no_bit_of_a_ticket_can_be_changed() -> None:
    authority = TicketAuthority()
    ticket = authority.issue(CLAIMS)
    for bit in range(len(ticket) * 8):
        forged = bytearray(ticket)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnknownTransfer):
            authority.verify(bytes(forged))


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1], lambda t: t + b"\0", lambda t: b""], ids=["cut", "longer", "empty"]
)
def test_a_ticket_of_another_length_is_refused(change) -> None:
    authority = TicketAuthority()
    with pytest.raises(UnknownTransfer):
        authority.verify(change(authority.issue(CLAIMS)))


def test_a_ticket_does_not_outlive_the_worker_s_start() -> None:
    with pytest.raises(UnknownTransfer):
        TicketAuthority().verify(TicketAuthority().issue(CLAIMS))
