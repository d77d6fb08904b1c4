"""Greedy decoding of the real default model equals transformers' `generate`, token for token.

The expected tokens were written by tests/support/make_greedy_golden.py; our side runs for real.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.assembly import LoadedModel, load_model
from tests.support.paged_generation import decode_greedily, make_sequences, prefill

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text())
NUM_OUTPUT_TOKENS = 64
CHUNK = 512

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(
        source="default",
        cache_dir=cache_dir(),
        device="cpu",
        backend="auto",
        numerics="reference",
        kv_format=KVFormat.FP32,
        block_size=16,
        kv_memory_bytes=400 << 20,
        max_model_len=None,
        progress=lambda _: None,
    )


def test_the_golden_prompts_cover_what_they_should() -> None:
    lengths = [len(case["prompt_token_ids"]) for case in GOLDEN]
    assert len(GOLDEN) >= 20
    assert {15, 16, 17, 32} <= set(lengths)
    assert max(lengths) >= 2000
    assert all(len(case["output_token_ids"]) == NUM_OUTPUT_TOKENS for case in GOLDEN)
    assert {case["name"].split(":")[0] for case in GOLDEN} >= {"chat", "code", "language"}


def test_greedy_equals_transformers(model: LoadedModel) -> None:
    """All prompts together: prefilled in chunks, then decoded in one batch."""
    generated = generate(model, [case["prompt_token_ids"] for case in GOLDEN])
    differing = [case["name"] for case, tokens in zip(GOLDEN, generated, strict=True) if tokens != _expected(case)]
    assert differing == []


def test_one_prompt_alone(model: LoadedModel) -> None:
    case = next(case for case in GOLDEN if case["name"] == "chat: capital")
    assert generate(model, [case["prompt_token_ids"]]) == [_expected(case)]


def generate(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    sequences = make_sequences(prompts, NUM_OUTPUT_TOKENS, model.runner.cache)
    decode_greedily(model.runner, sequences, prefill(model.runner, sequences, CHUNK), NUM_OUTPUT_TOKENS)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def _expected(case: dict[str, Any]) -> list[int]:
    return case["output_token_ids"]
