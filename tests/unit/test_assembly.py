"""Loading a worker's model: what is put together, how big the pool is, and what is refused by name."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, ModelLoadError
from common.kv.layout import KVFormat
from common.model.assembly import LoadedModel, load_model
from common.model.batch import ScheduledTokens
from common.model.identity import fingerprint
from tests.support.tiny_models import make_tiny_model

BLOCK_BYTES = {KVFormat.INT8: 2 * 2 * (2 * 16 * 16 + 2 * 16 * 2), KVFormat.FP32: 2 * 2 * 2 * 16 * 16 * 4}
"""layers x KV heads x (K and V of 16 positions x 16 dimensions, and scales): multiples of 64 already."""
INT8_BLOCK = BLOCK_BYTES[KVFormat.INT8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("assembly") / "tiny-llama", "llama")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def load(folder: Path, cache: Path, **overrides: Any) -> LoadedModel:
    settings: dict[str, Any] = {
        "source": str(folder),
        "cache_dir": cache,
        "device": "cpu",
        "backend": "reference",
        "numerics": "reference",
        "kv_format": KVFormat.INT8,
        "block_size": 16,
        "kv_memory_bytes": 1 << 20,
        "max_model_len": None,
        "progress": lambda _: None,
    }
    return load_model(**(settings | overrides))


@pytest.mark.parametrize("kv_format", KVFormat)
def test_a_loaded_model(folder: Path, shared_cache: Path, kv_format: KVFormat) -> None:
    lines: list[str] = []
    model = load(folder, shared_cache, kv_format=kv_format, progress=lines.append)
    assert model.prepared.name == "tiny-llama"
    assert model.config == model.prepared.config
    assert model.layout.format is kv_format
    assert model.num_blocks == model.runner.cache.num_blocks == (1 << 20) // BLOCK_BYTES[kv_format]
    assert model.max_model_len == min(1024, model.num_blocks * 16)
    assert model.fingerprint == fingerprint(model.prepared, model.layout, "reference")
    assert model.ops.name == "reference"
    assert not model.exact
    assert "fp32" in model.inexact_reason
    assert any(model.ops.description in line for line in lines)


def test_int8_is_exact_with_the_cpu_backend_alone(folder: Path, shared_cache: Path) -> None:
    lines: list[str] = []
    model = load(folder, shared_cache, numerics="int8", backend="cpu", progress=lines.append)
    assert (model.exact, model.inexact_reason) == (True, "")
    assert any("products: " in line for line in lines)
    plain = load(folder, shared_cache, numerics="int8")
    assert not plain.exact
    assert "reference backend" in plain.inexact_reason
    model.warm_up()
    plain.warm_up()


def test_the_fingerprint_names_rotation_rounding_and_the_very_weights(folder: Path, tmp_path: Path) -> None:
    model = load(folder, tmp_path, numerics="int8")
    (file,) = tmp_path.glob("models/*int8*/int8_weights.safetensors")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert model.fingerprint == fingerprint(model.prepared, model.layout, f"int8-rot2-gptq6-bytes4-{digest}")
    assert model.fingerprint != load(folder, tmp_path).fingerprint


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 200])
@pytest.mark.parametrize("kv_format", KVFormat)
def test_warm_up_fits_every_pool(folder: Path, shared_cache: Path, kv_format: KVFormat, num_blocks: int) -> None:
    model = load(folder, shared_cache, kv_format=kv_format, kv_memory_bytes=num_blocks * BLOCK_BYTES[kv_format])
    assert model.num_blocks == num_blocks
    model.warm_up()


def test_warm_up_changes_no_answer(folder: Path, shared_cache: Path) -> None:
    entry = [ScheduledTokens([3, 1, 4, 1, 5], 0, [0], 5)]
    cold, warm = load(folder, shared_cache), load(folder, shared_cache)
    warm.warm_up()
    assert warm.runner.run(entry).logits.equal(cold.runner.run(entry).logits)


def test_auto_chooses_a_device_and_a_backend(folder: Path, shared_cache: Path) -> None:
    model = load(folder, shared_cache, device="auto", backend="auto")
    model.warm_up()
    assert model.ops.description


def test_max_model_len_is_lowered(folder: Path, shared_cache: Path) -> None:
    assert load(folder, shared_cache, max_model_len=100).max_model_len == 100


def test_a_small_pool_lowers_max_model_len_and_says_so(folder: Path, shared_cache: Path) -> None:
    lines: list[str] = []
    model = load(folder, shared_cache, kv_memory_bytes=3 * INT8_BLOCK, progress=lines.append)
    assert model.max_model_len == 48
    assert any("48" in line and "1024" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "error", "parts"),
    [
        ({"device": "tpu"}, ConfigError, ["'tpu'", "auto, cpu, cuda"]),
        ({"backend": "fpga"}, ConfigError, ["'fpga'", "reference"]),
        ({"numerics": "int3"}, ConfigError, ["'int3'", "reference"]),
        ({"max_model_len": 1025}, ConfigError, ["1025", "1024"]),
        (
            {"kv_memory_bytes": INT8_BLOCK - 1},
            ModelLoadError,
            [str(INT8_BLOCK - 1), str(INT8_BLOCK)],
        ),
        (
            {"kv_memory_bytes": 2 * INT8_BLOCK, "max_model_len": 33},
            ModelLoadError,
            ["33", "32 tokens"],
        ),
        ({"block_size": 1, "kv_memory_bytes": 256}, ModelLoadError, ["1 tokens", "at least 2"]),
        ({"kv_memory_bytes": 2**60}, ModelLoadError, ["no room", str(2**60 // INT8_BLOCK * INT8_BLOCK)]),
    ],
    ids=[
        "device",
        "backend",
        "numerics",
        "max_model_len",
        "no block",
        "pool below max_model_len",
        "one token",
        "memory",
    ],
)
def test_refusals_name_the_values(
    folder: Path, shared_cache: Path, overrides: dict[str, Any], error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        load(folder, shared_cache, **overrides)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
