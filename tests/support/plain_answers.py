"""What a stack must answer, computed here: the same model, numerics and KV format, one token at a time from nothing.

No paging to speak of, no batch, no transfer, no speculation; sampled by the plain sampler.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.assembly import load_model
from common.model.batch import ScheduledTokens
from common.model.gumbel import gumbel_noise
from common.model.sampler import SampleRow
from common.sampling import OutputToken, SamplingParams
from common.tokenizer import Tokenizer
from tests.support.plain_sampler import plain_adjusted, plain_filtered, plain_logprobs


class PlainAnswers:
    def __init__(self, folder: Path) -> None:
        model = load_model(
            source=str(folder),
            cache_dir=cache_dir(),
            device="cpu",
            backend="auto",
            numerics="int8",
            kv_format=KVFormat.INT8,
            block_size=16,
            kv_memory_bytes=4 << 20,
            max_model_len=None,
            progress=lambda _: None,
        )
        files = model.prepared.tokenizer_files
        self.tokenizer = Tokenizer(files["tokenizer.json"], files["tokenizer_meta.json"])
        self._runner = model.runner
        self._known_logits: dict[tuple[int, ...], list[float]] = {}
        self._known_answers: dict[str, list[OutputToken]] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=True)

    def tokens(self, prompt: Sequence[int], params: SamplingParams) -> list[OutputToken]:
        key = f"{prompt} {params}"
        if key not in self._known_answers:
            self._known_answers[key] = self._answer(prompt, params)
        return self._known_answers[key]

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[OutputToken]:
        output: list[int] = []
        answer = []
        while len(output) < params.max_tokens and not (output and output[-1] in params.stop_token_ids):
            token_id = self._ranked(prompt, params, output)[0][0]
            answer.append(plain_logprobs(token_id, self._logits([*prompt, *output]), params.num_logprobs or 0))
            output.append(token_id)
        return answer

    def _ranked(self, prompt: Sequence[int], params: SamplingParams, output: Sequence[int]) -> list[tuple[int, float]]:
        """(token id, score) of the tokens that the filters leave, best first, the lowest id first among equals."""
        row = SampleRow(params, len(output), tuple(prompt), tuple(output))
        adjusted = plain_adjusted(self._logits([*prompt, *output]), row)
        if params.is_greedy:
            scores = dict(enumerate(adjusted))
        else:
            filtered = plain_filtered(adjusted, row)
            noise = gumbel_noise(params.seed, len(output), np.array([*filtered]))
            scores = {i: score + extra for (i, score), extra in zip(filtered.items(), noise.tolist(), strict=True)}
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))

    def _logits(self, token_ids: Sequence[int]) -> list[float]:
        key = tuple(token_ids)
        if key not in self._known_logits:
            blocks = range(self._runner.cache.num_blocks)
            result = self._runner.run([ScheduledTokens(token_ids, 0, blocks, num_logits=1)])
            self._known_logits[key] = result.logits[0].tolist()
        return self._known_logits[key]
