import pytest

from cli.topology import Topology


@pytest.mark.parametrize(
    ("text", "num_prefill", "num_decode"), [("colocated", 0, 1), ("1p1d", 1, 1), ("2p2d", 2, 2), ("12p3d", 12, 3)]
)
def test_a_topology_reads_back_as_it_was_written(text: str, num_prefill: int, num_decode: int) -> None:
    topology = Topology.parse(text)
    assert topology == Topology(num_prefill, num_decode)
    assert str(topology) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no topology"),
        ("1d1p", "is no topology"),
        ("1p1d ", "is no topology"),
        ("-1p1d", "is no topology"),
        ("٣p1d", "is no topology"),
        ("0p1d", "use colocated"),
        ("1p0d", "needs at least one"),
        ("65p1d", "more than 64"),
        ("1p999d", "more than 64"),
    ],
)
def test_what_is_no_topology_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Topology.parse(text)
