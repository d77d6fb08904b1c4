"""A ModelRunner without a model: its KV is the token ids themselves, its next token a function of all it reads.

The ids lie in a real KVCache, so that blocks can really be shipped. It reads the context through the block tables, as
attention does, so a wrong table, a stale block, a missing position or a block that was freed too early changes the
output. `expected_tokens` is the same function of the text alone.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import torch

from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.model.batch import ScheduledTokens
from common.model.runner import RunResult
from kernels.reference.ops import quantize

LAYER = 0
HEAD = 0


def next_token(context: Sequence[int], vocab_size: int, memory: int | None = None) -> int:
    """`memory`: only that many last tokens matter, so that the text soon repeats itself."""
    context = context if memory is None else context[-memory:]
    digest = blake2b(pack(f"<{len(context)}q", *context), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    stop: frozenset[int] = frozenset(),
    memory: int | None = None,
) -> list[int]:
    """What a request must be answered, whatever happens around it."""
    text = list(prompt)
    while len(text) - len(prompt) < count:
        text.append(next_token(text, vocab_size, memory))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


def fake_layout(block_size: int, kv_format: KVFormat = KVFormat.FP32) -> KVLayout:
    """One number a position: the token id plus one, so that an unwritten slot is no token."""
    return KVLayout(kv_format, block_size, num_layers=1, num_kv_heads=1, head_dim=1)


class FakeRunner:
    """With a quantized cache a number is read as near to the id as the format allows, and rounded."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        memory: int | None = None,
        kv_format: KVFormat = KVFormat.FP32,
    ) -> None:
        self.cache = KVCache(fake_layout(block_size, kv_format), num_blocks, torch.device("cpu"))
        self.vocab_size = vocab_size
        self.poisoned_token: int | None = None  # an entry that computes it fails, as one with NaN would
        self.num_runs = 0
        self.num_tokens = 0
        self._block_size = block_size
        self._memory = memory
        layer = self.cache.layer(LAYER)
        self._slots = layer.k[:, HEAD, :, 0].numpy()
        self._scales = None if layer.k_scale is None else layer.k_scale[:, HEAD, :].numpy()

    def run(self, scheduled: Sequence[ScheduledTokens]) -> RunResult:
        assert scheduled
        self.num_runs += 1
        self.num_tokens += sum(len(entry.token_ids) for entry in scheduled)
        self._write(scheduled)
        rows = [row for entry in scheduled for row in self._rows(entry)]
        logits = torch.zeros((len(rows), self.vocab_size))
        for index, token_id in enumerate(rows):
            logits[index, token_id] = 10.0
        return RunResult(logits, tuple(self.poisoned_token in entry.token_ids for entry in scheduled))

    def _write(self, scheduled: Sequence[ScheduledTokens]) -> None:
        written: set[tuple[int, int]] = set()
        for entry in scheduled:
            for offset, token_id in enumerate(entry.token_ids):
                slot = self._slot(entry, entry.start + offset)
                assert slot not in written, "two entries of one step write the same slot"
                written.add(slot)
                self._store(slot, token_id)

    def _rows(self, entry: ScheduledTokens) -> list[int]:
        end = entry.start + len(entry.token_ids)
        context = [self._load(self._slot(entry, position)) for position in range(end)]
        return [next_token(context[: n + 1], self.vocab_size, self._memory) for n in range(end - entry.num_logits, end)]

    def _store(self, slot: tuple[int, int], token_id: int) -> None:
        if self._scales is None:
            self._slots[slot] = token_id + 1
        else:
            values, scale, _ = quantize(torch.tensor([float(token_id + 1)]))
            self._slots[slot], self._scales[slot] = int(values), float(scale)

    def _load(self, slot: tuple[int, int]) -> int:
        scale = 1.0 if self._scales is None else float(self._scales[slot])
        return round(float(self._slots[slot]) * scale) - 1

    def _slot(self, entry: ScheduledTokens, position: int) -> tuple[int, int]:
        return entry.block_ids[position // self._block_size], position % self._block_size
