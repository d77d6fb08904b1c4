"""The smallest engine: sequences over a paged cache, computed in chunks and decoded greedily. Nothing is reused."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.model.batch import ScheduledTokens
from common.model.config import ModelConfig
from common.model.runner import ModelRunner

BLOCK_SIZE = 16


@dataclass(slots=True)
class PagedSequence:
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # [V] of each computed position, where they were kept


def make_layout(config: ModelConfig, kv_format: KVFormat) -> KVLayout:
    return KVLayout(kv_format, BLOCK_SIZE, config.num_layers, config.num_kv_heads, config.head_dim)


def make_cache(config: ModelConfig, kv_format: KVFormat, num_tokens: Sequence[int], device: torch.device) -> KVCache:
    """Room for sequences of these lengths, and one block that nobody owns. It starts as garbage: what was not written
    must not be read."""
    layout = make_layout(config, kv_format)
    cache = KVCache(layout, 1 + sum(map(layout.num_blocks, num_tokens)), device)
    for layer in range(config.num_layers):
        view = cache.layer(layer)
        view.k.fill_(99)
        view.v.fill_(-99)
        if view.k_scale is not None and view.v_scale is not None:
            view.k_scale.fill_(9.0)
            view.v_scale.fill_(9.0)
    return cache


def make_sequences(prompts: Sequence[Sequence[int]], num_output_tokens: int, cache: KVCache) -> list[PagedSequence]:
    """Blocks are dealt out in a shuffled order, the same every time."""
    free = list(range(1, cache.num_blocks))
    random.Random(0).shuffle(free)
    sequences = []
    for prompt in prompts:
        count = cache.layout.num_blocks(len(prompt) + num_output_tokens)
        sequences.append(PagedSequence(list(prompt), len(prompt), [free.pop() for _ in range(count)]))
    return sequences


def compute(
    runner: ModelRunner, sequences: Sequence[PagedSequence], num_tokens: Sequence[int], *, keep_all: bool = False
) -> list[torch.Tensor]:
    """One step: the next `num_tokens[i]` tokens of each sequence. Returns each one's last row of logits [V]; with
    `keep_all` every row is appended to the sequence's `logits`."""
    scheduled = [
        ScheduledTokens(
            token_ids=s.token_ids[s.num_computed_tokens : s.num_computed_tokens + count],
            start=s.num_computed_tokens,
            block_ids=s.block_ids,
            num_logits=count if keep_all else 1,
        )
        for s, count in zip(sequences, num_tokens, strict=True)
    ]
    result = runner.run(scheduled)
    assert not any(result.failed)
    ends = list(accumulate(entry.num_logits for entry in scheduled))
    assert result.logits.shape[0] == ends[-1]
    for s, count, end in zip(sequences, num_tokens, ends, strict=True):
        s.num_computed_tokens += count
        if keep_all:
            s.logits.extend(result.logits[end - count : end])
    return [result.logits[end - 1] for end in ends]


def prefill(
    runner: ModelRunner, sequences: Sequence[PagedSequence], chunk: int, *, keep_all: bool = False
) -> list[torch.Tensor]:
    """Computes every known token, `chunk` of each unfinished sequence in a step. Returns the last rows of logits."""
    last: dict[int, torch.Tensor] = {}
    while True:
        left = {i: len(s.token_ids) - s.num_computed_tokens for i, s in enumerate(sequences)}
        active = [i for i, count in left.items() if count > 0]
        if not active:
            return [last[i] for i in range(len(sequences))]
        counts = [min(chunk, left[i]) for i in active]
        rows = compute(runner, [sequences[i] for i in active], counts, keep_all=keep_all)
        last.update(zip(active, rows, strict=True))


def decode_greedily(
    runner: ModelRunner, sequences: Sequence[PagedSequence], rows: Sequence[torch.Tensor], num_output_tokens: int
) -> None:
    """Appends `num_output_tokens` tokens to each sequence, all sequences together, given its last row of logits."""
    for position in range(num_output_tokens):
        for s, row in zip(sequences, rows, strict=True):
            s.token_ids.append(int(row.argmax()))
        if position + 1 < num_output_tokens:
            rows = compute(runner, sequences, [1] * len(sequences))
