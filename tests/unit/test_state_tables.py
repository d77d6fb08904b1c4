"""docs/hand-off.md tells the states, transitions and points of faults that the code has, and no others."""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import pytest

from common.faults.points import KINDS_AT
from decode_svc import sequence, transfer
from gateway import attempt
from prefill_svc import job

PAGE = (Path(__file__).parents[2] / "docs" / "hand-off.md").read_text()
TABLES: dict[str, Mapping[Enum, frozenset[Enum]]] = {
    "A transfer": transfer.LEGAL_TRANSITIONS,  # type: ignore[dict-item]
    "A PrefillJob": job.LEGAL_TRANSITIONS,  # type: ignore[dict-item]
    "A Sequence": sequence.LEGAL_TRANSITIONS,  # type: ignore[dict-item]
    "An attempt": attempt.LEGAL_TRANSITIONS,  # type: ignore[dict-item]
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under `heading`, without its head."""
    section = re.split(r"^## ", PAGE.split(f"## {heading}", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_has_the_code_s_transitions(heading: str) -> None:
    written = {row[0]: set() if row[2] == "–" else set(row[2].split(", ")) for row in rows(heading)}
    assert written == {state.name: {after.name for after in allowed} for state, allowed in TABLES[heading].items()}


@pytest.mark.parametrize("heading", TABLES)
def test_every_state_can_end_and_the_end_is_the_end(heading: str) -> None:
    table = TABLES[heading]
    (end,) = [state for state, allowed in table.items() if not allowed]
    assert end.name == "ENDED"
    assert set(table) == set(type(end))
    assert all(end in allowed for state, allowed in table.items() if state is not end)


def test_the_page_has_the_code_s_points_of_faults() -> None:
    written = {row[0].strip("`"): set(row[2].split(", ")) for row in rows("Faults on purpose")}
    assert written == {str(point): {str(kind) for kind in kinds} for point, kinds in KINDS_AT.items()}
