"""A step's input as tensors. One builder turns a scheduler's decision into it; nothing else makes these tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
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
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    query_start = [0]
    for entry in scheduled:
        end = entry.start + len(entry.token_ids)
        token_ids.extend(entry.token_ids)
        positions.extend(range(entry.start, end))
        slots.extend(entry.block_ids[p // block_size] * block_size + p % block_size for p in range(entry.start, end))
        logit_rows.extend(range(len(token_ids) - entry.num_logits, len(token_ids)))
        query_start.append(len(token_ids))
    context_lens = [entry.start + len(entry.token_ids) for entry in scheduled]
    attention = AttentionBatch(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=_block_tables(scheduled, block_size, device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_query_len=max(len(entry.token_ids) for entry in scheduled),
        max_context_len=max(context_lens),
    )
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        attention=attention,
    )


def _block_tables(scheduled: Sequence[ScheduledTokens], block_size: int, device: torch.device) -> torch.Tensor:
    used = [-(-(entry.start + len(entry.token_ids)) // block_size) for entry in scheduled]
    width = max(used)
    rows = [[*entry.block_ids[:count], *([0] * (width - count))] for entry, count in zip(scheduled, used, strict=True)]
    return torch.tensor(rows, dtype=torch.int32, device=device)
