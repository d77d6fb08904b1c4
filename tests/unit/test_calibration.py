"""Calibration: the text in a model's tokens, and what each product of each layer reads, whatever the family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.texts import bundled_texts
from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.calibration.calibrated_weights import nearest_weights
from common.model.calibration.layer_inputs import PRODUCTS, LayerRunner
from common.model.calibration.token_ids import calibration_sequences
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.rotation import rotate
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import select
from tests.support.paged_generation import make_cache, make_sequences, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, a window": ("mistral", {"sliding_window": 8}),
    "qwen2, a window in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    family, overrides = request.param
    root = tmp_path_factory.mktemp("calibration")
    return prepare_model(str(make_tiny_model(root / "tiny", family, **overrides)), root / "cache", lambda _: None)


def test_token_ids_fit_the_model_and_are_the_same_every_time(prepared: PreparedModel) -> None:
    sequences = calibration_sequences(prepared)
    assert sequences == calibration_sequences(prepared)
    assert sum(map(len, sequences)) > 4000
    for limit in (40, 512):
        small = replace(prepared, config=replace(prepared.config, max_model_len=limit, vocab_size=100))
        assert all(0 < len(s) <= limit and 0 <= min(s) <= max(s) < 100 for s in calibration_sequences(small))
    assert max(max(sequence) for sequence in sequences) < VOCAB_SIZE


def test_layers_run_one_at_a_time_are_the_model(prepared: PreparedModel) -> None:
    """The head, on what the last layer's run hands on, gives the logits of the whole model, bit for bit."""
    ops, rotated = select(CPU, "cpu", cache_dir()), rotate(prepared.config, load_weights(prepared, CPU))
    weights, prompts = dict(nearest_weights(rotated.weights)), [list(range(30, 70)), [7], list(range(17))]
    runner = LayerRunner(rotated.config, rotated.down_block, ops, prompts)
    residual = F.embedding(torch.tensor([t for p in prompts for t in p]), weights["model.embed_tokens.weight"])
    for layer in range(rotated.config.num_layers):
        prefix = f"model.layers.{layer}."
        run = runner.run(
            layer, {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}, residual
        )
        assert [rows.values.shape[1] for rows in run.inputs] == [
            weights[f"{prefix}{names[0]}.weight"].shape[1] for names in PRODUCTS
        ]
        residual = run.residual
    transformer = Transformer(rotated.config, weights, ops, CPU, Numerics.INT8, down_block=rotated.down_block)
    whole = ModelRunner(transformer, make_cache(rotated.config, KVFormat.INT8, [len(p) for p in prompts], CPU))
    sequences = make_sequences(prompts, 0, whole.cache)
    prefill(whole, sequences, 64, keep_all=True)
    expected = torch.stack([row for sequence in sequences for row in sequence.logits])
    head = (weights["lm_head.weight"].float() * weights["lm_head.weight_scales"][:, None])[:, :]
    values = (run.head_input.values.float() - 128) * run.head_input.scales[:, None]
    torch.testing.assert_close(values @ head.T, expected, rtol=0, atol=1e-4)


def test_nothing_is_both_calibrated_on_and_evaluated() -> None:
    folder = Path(__file__).parents[2] / "common/model/calibration"
    calibration = {line.strip() for file in folder.glob("*.txt") for line in file.read_text().splitlines()}
    assert len(calibration) > 100
    evaluated = {line.strip() for text in bundled_texts().values() for line in text.splitlines()}
    assert not {line for line in calibration & evaluated if len(line) > 30}  # shorter ones are everybody's
