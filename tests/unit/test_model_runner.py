"""The runner: rows of logits in order, and entries that met a NaN or an Inf named without harm to the others."""

from pathlib import Path

import pytest
import torch

from common.kv.layout import KVFormat
from common.model.batch import ScheduledTokens
from common.model.config import ModelConfig
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.runner import ModelRunner
from common.model.transformer import Transformer
from common.model.weights import load_weights
from kernels.ops import select
from tests.support.paged_generation import make_cache
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
BAD_TOKEN = 77
ENTRIES = [ScheduledTokens([5, 6, 7], 0, [1], 3), ScheduledTokens([8, 9], 0, [2], 1), ScheduledTokens([4], 0, [3], 1)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    root: Path = tmp_path_factory.mktemp("runner")
    folder = make_tiny_model(root / "tiny", "llama", tie_word_embeddings=False)
    prepared = prepare_model(str(folder), root / "cache", lambda _: None)
    return prepared.config, load_weights(prepared, CPU)


@pytest.fixture(params=KVFormat)
def kv_format(request: pytest.FixtureRequest) -> KVFormat:
    return request.param


def make_runner(
    config: ModelConfig, weights: dict[str, torch.Tensor], kv_format: KVFormat = KVFormat.INT8
) -> ModelRunner:
    transformer = Transformer(config, weights, select(CPU, "reference"), CPU, Numerics.REFERENCE)
    return ModelRunner(transformer, make_cache(config, kv_format, [16] * 8, CPU))


def with_bad_token(weights: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    """Weights whose embedding of BAD_TOKEN holds one `value`."""
    embedding = weights["model.embed_tokens.weight"].clone()
    embedding[BAD_TOKEN, 3] = value
    return weights | {"model.embed_tokens.weight": embedding}


class TestRows:
    def test_are_in_the_entries_order(self, tiny: tuple[ModelConfig, dict[str, torch.Tensor]]) -> None:
        runner = make_runner(*tiny)
        together = runner.run(ENTRIES)
        apart = torch.cat([runner.run([entry]).logits for entry in ENTRIES])
        assert together.failed == (False, False, False)
        # fp32 products round differently for different numbers of rows; logits are below 10.
        torch.testing.assert_close(together.logits, apart, rtol=0, atol=1e-5)

    def test_none_wanted_none_given(self, tiny: tuple[ModelConfig, dict[str, torch.Tensor]]) -> None:
        result = make_runner(*tiny).run([entry._replace(num_logits=0) for entry in ENTRIES])
        assert result.logits.shape == (0, tiny[0].vocab_size)
        assert result.failed == (False, False, False)


class TestFailures:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("num_logits", [0, 1])
    def test_only_the_entry_that_met_it(
        self, tiny: tuple[ModelConfig, dict[str, torch.Tensor]], kv_format: KVFormat, value: float, num_logits: int
    ) -> None:
        """Also where no logits are wanted: K and V show it."""
        config, weights = tiny
        runner = make_runner(config, with_bad_token(weights, value), kv_format)
        bad = ScheduledTokens([1, BAD_TOKEN, 2], 0, [4], num_logits)
        result = runner.run([*ENTRIES[:2], bad, ENTRIES[2]])
        assert result.failed == (False, False, True, False)
        good = make_runner(config, weights, kv_format).run([*ENTRIES[:2], bad, ENTRIES[2]]).logits
        num_before = 4
        assert torch.equal(result.logits[:num_before], good[:num_before])
        assert torch.equal(result.logits[num_before + num_logits :], good[num_before + num_logits :])
        assert not result.logits[num_before : num_before + num_logits].any()

    def test_nonfinite_logits_alone(self, tiny: tuple[ModelConfig, dict[str, torch.Tensor]]) -> None:
        config, weights = tiny
        head = weights["lm_head.weight"].clone()
        head[9, 0] = float("inf")
        result = make_runner(config, weights | {"lm_head.weight": head}).run(ENTRIES)
        assert result.failed == (True, True, True)

    def test_a_cache_that_was_spoiled_earlier_shows_in_the_logits(
        self, tiny: tuple[ModelConfig, dict[str, torch.Tensor]]
    ) -> None:
        config, weights = tiny
        runner = make_runner(config, weights, KVFormat.FP32)
        runner.run(ENTRIES)
        runner.cache.layer(0).v[1] = float("nan")
        result = runner.run([ScheduledTokens([1], 3, [1], 1), ScheduledTokens([1], 2, [2], 1)])
        assert result.failed == (True, False)
