"""A model's weights as the int8 path reads them, rotated and quantized: made once, kept in the cache, then mapped.

All workers that share a cache multiply by the very same integers, whatever made them.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import ModelLoadError
from common.model.checkpoint import named_errors
from common.model.config_json import config_to_json
from common.model.int8_product import quantize_weight
from common.model.model_cache import Progress, entry_key, open_or_build
from common.model.prepared import PreparedModel
from common.model.rotation import ROTATION, RotatedModel, rotate, rotated_model
from common.model.weights import load_weights

QUANTIZED_WEIGHTS = "int8_weights.safetensors"
_FORMAT_VERSION = 1
"""Rises whenever the same rotated weights would be quantized or written differently."""
_QUANTIZED_BYTES_PER_S = 1e8  # on a small machine; for the announcement only


def load_quantized(prepared: PreparedModel, cache_dir: Path, device: torch.device, progress: Progress) -> RotatedModel:
    """The rotated model with the weights of its products quantized, as `Transformer` takes them; on the CPU mapped.

    Errors as of `prepare_quantized`.
    """
    file = prepare_quantized(prepared, cache_dir, progress) / QUANTIZED_WEIGHTS
    with named_errors(file):
        return rotated_model(prepared.config, load_file(file, device=str(device)))


def prepare_quantized(prepared: PreparedModel, cache_dir: Path, progress: Progress) -> Path:
    """The cache entry that holds QUANTIZED_WEIGHTS, verified; made where it is absent or damaged.

    Safe in several processes at once. Raises ModelLoadError when weights cannot be read or the cache not be written.
    """

    def build(folder: Path) -> None:
        num_bytes = sum(file.stat().st_size for file in prepared.weight_files)
        progress(f"quantizing {prepared.name} (about {1 + round(num_bytes / _QUANTIZED_BYTES_PER_S)} s, once) ...")
        started = time.monotonic()
        rotated = rotate(prepared.config, load_weights(prepared, torch.device("cpu")))
        _write(dict(_quantized(rotated.weights)), folder / QUANTIZED_WEIGHTS)
        progress(f"quantized {prepared.name} in {time.monotonic() - started:.0f} s")

    return open_or_build(cache_dir / "models", _entry_key(prepared), build, progress)


def _quantized(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of products become int8, with scales; the embedding, biases and norms stay fp32."""
    for name, weight in weights.items():
        if weight.dim() == 2 and name != "model.embed_tokens.weight":
            quantized = quantize_weight(weight)
            yield name, quantized.values
            yield f"{name}_scales", quantized.scales
        else:
            yield name, weight


def _write(weights: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(weights, file)
    except SafetensorError as error:  # a full disk, too
        raise ModelLoadError(f"cannot write {file}: {error}") from error


def _entry_key(prepared: PreparedModel) -> str:
    """Beside the weights' digest the configuration: no weight says how wide a head is, and its rotation is so wide."""
    identity = {
        "format": _FORMAT_VERSION,
        "weights": prepared.weights_digest.hex(),
        "config": config_to_json(prepared.config).decode(),
    }
    return entry_key(f"{prepared.name}-int8-{ROTATION}", identity)
