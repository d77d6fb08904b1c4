"""Hugging Face folders that cannot be served: each fault by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelLoadError
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.weights import load_weights
from tests.support.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", "llama")


def prepare(folder: Path, cache: Path) -> PreparedModel:
    return prepare_model(str(folder), cache, lambda _line: None)


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes]) and None


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **values)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return harm


def only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def shard_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), "has no config.json"),
    "config is not JSON": (write("config.json", b"{model"), "config.json is not JSON"),
    "config is not text": (write("config.json", b"\xff\xfe\x00"), "config.json is not JSON"),
    "config is a list": (write("config.json", b"[]"), "config.json holds a JSON list"),
    "config of another model": (config(model_type="gpt2", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "config of the wrong type": (config(hidden_size="wide"), "config.json: reading the configuration failed"),
    "config with a null": (config(num_hidden_layers=None), "config.json"),
    "rope type": (config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
    "unknown rope type": (config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "'spiral'"),
    "activation": (config(hidden_act="gelu"), "activation 'gelu'"),
    "quantized": (config(quantization_config={"quant_method": "awq"}), "quantization_config (awq)"),
    "no weights": (remove("model.safetensors"), "has no weights"),
    "pickled weights": (only_pickled_weights, "pytorch_model.bin only"),
    "lost shard": (lost_shard, "model-1.safetensors is missing"),
    "shard outside": (shard_outside, "'../other.safetensors' is not a plain file name"),
    "weights cut short": (cut("model.safetensors", 100_000), "model.safetensors cannot be read as safetensors"),
    "weights cut in the header": (cut("model.safetensors", 5), "model.safetensors cannot be read as safetensors"),
    "empty weights": (write("model.safetensors", b""), "model.safetensors cannot be read as safetensors"),
    "missing tensor": (weights(lambda tensors: tensors.pop(Q_PROJ)), f"the first is {Q_PROJ}"),
    "unknown tensor": (weights(lambda tensors: tensors.update(extra=torch.zeros(1))), "tensor extra is not part"),
    "misshapen tensor": (config(intermediate_size=128), "mlp.down_proj.weight has shape (64, 96)"),
    "integers": (weights(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)})), "format I8"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer"),
    "broken tokenizer": (write("tokenizer.json", b"{}"), "tokenizer.json is not a tokenizer"),
    "broken tokenizer settings": (write("tokenizer_config.json", b"{"), "reading the tokenizer failed"),
    "broken generation settings": (write("generation_config.json", b"{"), "generation_config.json is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named(fault: str, tiny: Path, cache: Path) -> None:
    harm, reason = FAULTS[fault]
    harm(tiny)
    with pytest.raises(ModelLoadError) as raised:
        prepare(tiny, cache)
    assert reason in str(raised.value)
    assert str(tiny) in str(raised.value)


def test_weights_that_changed_after_they_were_prepared_are_checked_again(tiny: Path, cache: Path) -> None:
    prepared = prepare(tiny, cache)
    cut("model.safetensors", 100_000)(tiny)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load_weights(prepared, CPU)
