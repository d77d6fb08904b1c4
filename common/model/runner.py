"""Turns a scheduler's decision into tensors, runs the model, and says which entries met a NaN or an Inf.

Owns the KV cache's bytes on behalf of one engine; holds no sequence and remembers nothing between two runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from common.kv.cache import KVCache
from common.model.batch import ScheduledTokens, build_batch
from common.model.transformer import ForwardPass, ForwardResult


@dataclass(frozen=True, slots=True)
class RunResult:
    """`logits` [R, V] fp32 on the model's device: `num_logits` rows of each entry, in the entries' order.

    A failed entry's KV must not be used nor its tokens be sent (NumericFailure). Its logits are zeros, so that
    sampling them with the others is harmless; the other entries' rows are not affected.
    """

    logits: torch.Tensor
    failed: tuple[bool, ...]


class ModelRunner:
    def __init__(self, transformer: ForwardPass, cache: KVCache) -> None:
        self.transformer = transformer
        self.cache = cache

    def run(self, scheduled: Sequence[ScheduledTokens]) -> RunResult:
        """One forward pass. Preconditions: at least one entry; each has a token and blocks for its positions."""
        batch = build_batch(scheduled, self.cache.layout.block_size, self.transformer.device)
        result = self.transformer.forward(batch, self.cache)
        failed = _failed_entries(scheduled, result)
        if any(failed):
            rows = [failed[i] for i, entry in enumerate(scheduled) for _ in range(entry.num_logits)]
            keep = torch.tensor(rows, device=result.logits.device).logical_not()
            logits = torch.where(keep[:, None], result.logits, 0.0)
            return RunResult(logits, failed)
        return RunResult(result.logits, failed)


def _failed_entries(scheduled: Sequence[ScheduledTokens], result: ForwardResult) -> tuple[bool, ...]:
    with torch.inference_mode():
        bad_kv = result.nonfinite != 0
        bad_logits = result.logits.sum(dim=1).isfinite().logical_not()  # a NaN or an Inf survives a sum: one pass
        if not (bad_kv.any() | bad_logits.any()):  # one transfer from the device in the usual case
            return (False,) * len(scheduled)
    token_ends = list(accumulate(len(entry.token_ids) for entry in scheduled))
    logit_ends = list(accumulate(entry.num_logits for entry in scheduled))
    return tuple(
        bool(bad_kv[token_end - len(entry.token_ids) : token_end].any())
        or bool(bad_logits[logit_end - entry.num_logits : logit_end].any())
        for entry, token_end, logit_end in zip(scheduled, token_ends, logit_ends, strict=True)
    )
