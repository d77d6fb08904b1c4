"""A step's input as tensors. One builder turns a scheduler's decision into it; nothing else makes these tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.batch import AttentionBatch


class ScheduledTokens(NamedTuple):
    """New tokens of one sequence in a step: `token_ids` at positions `start`, `start + 1`, ..."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]  # cover positions 0 .. start + len(token_ids) - 1
    num_logits: int  # logits are wanted of this many last rows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    logit_rows: torch.Tensor  # [R] int64, rows of the batch whose logits are wanted, ascending
    attention: AttentionBatch


def build_batch(scheduled: Sequence[ScheduledTokens], block_size: int, device: torch.device) -> ForwardBatch:
    """Lays the sequences end to end, in the given order. Precondition: each has at least one token."""
    lengths = np.array([len(entry.token_ids) for entry in scheduled], np.int64)
    starts = np.array([entry.start for entry in scheduled], np.int64)
    ends = np.cumsum(lengths)
    context_lens = starts + lengths
    of_sequence = np.repeat(np.arange(len(scheduled)), lengths)
    positions = np.arange(ends[-1]) + np.repeat(context_lens - ends, lengths)
    tables = _block_tables(scheduled, -(-context_lens // block_size))
    slots = tables[of_sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_logits = [entry.num_logits for entry in scheduled]
    logit_rows = [row for end, count in zip(ends.tolist(), num_logits, strict=True) for row in range(end - count, end)]
    token_ids = np.fromiter(chain.from_iterable(entry.token_ids for entry in scheduled), np.int64, int(ends[-1]))

    def tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    attention = AttentionBatch(
        query_start=tensor(np.concatenate(([0], ends)), torch.int32),
        context_lens=tensor(context_lens, torch.int32),
        block_tables=tensor(tables, torch.int32),
        slot_mapping=tensor(slots, torch.int64),
        max_query_len=int(lengths.max()),
        max_context_len=int(context_lens.max()),
    )
    return ForwardBatch(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        attention=attention,
    )


def _block_tables(scheduled: Sequence[ScheduledTokens], used: NDArray[np.int64]) -> NDArray[np.int32]:
    """[S, most blocks used], zeros past a sequence's `used` [S] blocks."""
    tables = np.zeros((len(scheduled), int(used.max())), np.int32)
    ids = chain.from_iterable(entry.block_ids[:count] for entry, count in zip(scheduled, used.tolist(), strict=True))
    tables[np.arange(tables.shape[1]) < used[:, None]] = np.fromiter(ids, np.int32, int(used.sum()))
    return tables
