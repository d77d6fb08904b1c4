"""The compiled forward pass against single operations, one after the other: the same bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import cache_dir
from common.kv.layout import KVFormat
from common.model.assembly import load_transformer
from common.model.batch import ScheduledTokens
from common.model.compiled_transformer import CompiledTransformer
from common.model.linear import Numerics
from common.model.loading import prepare_model
from common.model.quantized_model import load_quantized
from common.model.runner import ModelRunner
from common.model.transformer import ForwardPass, Transformer
from kernels.ops import Ops, select
from tests.support.paged_generation import compute, make_cache, make_sequences, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
LENGTHS = (70, 1, 17, 300)
NUM_STEPS = 3

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads wider than the hidden size": ("llama", {"head_dim": 32}),
    "llama, sizes that fill no vector": ("llama", {"hidden_size": 40, "intermediate_size": 100, "head_dim": 10}),
    "mistral, window": ("mistral", {"sliding_window": 20}),
    "qwen2, window on the upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"attention_bias": True}),
}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select(CPU, "cpu", cache_dir())


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_both(case: str, folder: Path, ops: Ops) -> tuple[CompiledTransformer, Transformer]:
    family, changes = CASES[case]
    prepared = prepare_model(str(make_tiny_model(folder / "tiny", family, **changes)), folder / "cache", lambda _: None)
    compiled = load_transformer(prepared, folder / "cache", ops, CPU, Numerics.INT8, 512, lambda _: None).forward_pass
    assert isinstance(compiled, CompiledTransformer)
    rotated = load_quantized(prepared, folder / "cache", CPU, lambda _: None).rotated
    assert {"model.layers.0.input_layernorm.offset", "model.layers.1.self_attn.k_offset"} < set(rotated.weights)
    plain = Transformer(rotated.config, rotated.weights, ops, CPU, Numerics.INT8, 512, rotated.down_block)
    return compiled, plain


def all_logits(model: ForwardPass, kv_format: KVFormat, chunk: int) -> torch.Tensor:
    """Of every position of some sequences that are prefilled together in chunks, then decoded together."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    cache = make_cache(model.config, kv_format, [n + NUM_STEPS for n in LENGTHS], CPU)
    runner, sequences = ModelRunner(model, cache), make_sequences(prompts, NUM_STEPS, cache)
    prefill(runner, sequences, chunk, keep_all=True)
    for _ in range(NUM_STEPS):
        for sequence in sequences:
            sequence.token_ids.append(int(sequence.logits[-1].argmax()))
        compute(runner, sequences, [1] * len(sequences), keep_all=True)
    return torch.stack([logits for sequence in sequences for logits in sequence.logits])


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_single_operations(case: str, tmp_path: Path, ops: Ops) -> None:
    compiled, plain = make_both(case, tmp_path, ops)
    for kv_format in KVFormat:
        expected = all_logits(plain, kv_format, 64)
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(all_logits(compiled, kv_format, 64), expected), f"{kv_format}, {num_threads} threads"


@pytest.mark.parametrize("case", ["llama", "llama, sizes that fill no vector"])
def test_bands_of_any_size_give_the_bits_of_phases(case: str, tmp_path: Path, ops: Ops) -> None:
    compiled, _ = make_both(case, tmp_path, ops)
    torch.set_num_threads(8)  # too many for bands
    expected = all_logits(compiled, KVFormat.INT8, 16)
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(all_logits(compiled, KVFormat.INT8, 300), expected), f"{num_threads} threads"


def test_one_memory_serves_pools_and_batches_of_any_size(tmp_path: Path, ops: Ops) -> None:
    compiled, _ = make_both("llama", tmp_path, ops)
    expected = all_logits(compiled, KVFormat.INT8, 16)
    all_logits(compiled, KVFormat.FP32, 300)
    assert torch.equal(all_logits(compiled, KVFormat.INT8, 16), expected)


def test_rows_without_logits(tmp_path: Path, ops: Ops) -> None:
    compiled, _ = make_both("llama", tmp_path, ops)
    cache = make_cache(compiled.config, KVFormat.INT8, [16], CPU)
    assert ModelRunner(compiled, cache).run([ScheduledTokens([5, 6], 0, [1], 0)]).logits.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("blocks", [[2], [-1]])
def test_a_block_that_is_not_in_the_pool_writes_nothing(blocks: list[int], tmp_path: Path, ops: Ops) -> None:
    compiled, _ = make_both("llama", tmp_path, ops)
    cache = make_cache(compiled.config, KVFormat.INT8, [16], CPU)
    before = cache.read_blocks([0, 1], 32)
    with pytest.raises(IndexError, match="not among"):
        ModelRunner(compiled, cache).run([ScheduledTokens([5], 0, [1], 1), ScheduledTokens([5], 0, blocks, 1)])
    assert cache.read_blocks([0, 1], 32) == before
