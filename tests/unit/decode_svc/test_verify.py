import pytest

from common.sampling import OutputToken
from decode_svc.speculation.verify import count_accepted


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted"),
    [((), (5,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 9, 3), 1), ((1, 2), (9, 2, 3), 0)],
    ids=["nothing proposed", "all", "first only", "none, though a later one agrees"],
)
def test_drafts_stand_up_to_the_first_that_differs(
    drafts: tuple[int, ...], choices: tuple[int, ...], accepted: int
) -> None:
    assert count_accepted(drafts, [OutputToken(choice) for choice in choices]) == accepted
