"""A step's decision as what the runner and the sampler take, and back: which rows belong to whom."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

from common.model.batch import ScheduledTokens
from common.model.sampler import SampleRow
from decode_svc.scheduler import ScheduledSequence


class RowRange(NamedTuple):
    """Rows [start, end) of the step's logits belong to one scheduled sequence."""

    start: int
    end: int


def scheduled_tokens(entry: ScheduledSequence) -> ScheduledTokens:
    sequence = entry.sequence
    tokens = sequence.tokens(entry.start, entry.start + entry.num_tokens)
    return ScheduledTokens(
        token_ids=[*tokens, *entry.draft_token_ids] if entry.draft_token_ids else tokens,
        start=entry.start,
        block_ids=sequence.table.block_ids,
        num_logits=_num_rows(entry),
    )


def row_ranges(entries: Rows[ScheduledSequence]) -> list[RowRange]:
    ranges: list[RowRange] = []
    start = 0
    for entry in entries:
        ranges.append(RowRange(start, start + _num_rows(entry)))
        start = ranges[-1].end
    return ranges


def sample_rows(entry: ScheduledSequence) -> list[SampleRow]:
    """One row a position: after the last confirmed token, then after each draft token, with the history that holds
    there if the drafts before it stand."""
    sequence = entry.sequence
    if not entry.samples:
        return []
    num_output = len(sequence.output_token_ids)
    if not entry.draft_token_ids:  # the usual case copies no history
        return [SampleRow(sequence.sampling, num_output, sequence.prompt_token_ids, sequence.output_token_ids)]
    return [
        SampleRow(
            params=sequence.sampling,
            output_position=num_output + index,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=[*sequence.output_token_ids, *entry.draft_token_ids[:index]],
        )
        for index in range(_num_rows(entry))
    ]


def _num_rows(entry: ScheduledSequence) -> int:
    return 1 + len(entry.draft_token_ids) if entry.samples else 0
