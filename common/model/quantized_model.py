"""A model's weights as the int8 path reads them, rotated and quantized: made once, kept in the cache, then mapped.

All workers that share a cache multiply by the very same integers, whatever made them; others' are told apart by digest.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import ModelLoadError
from common.model.calibration.calibrated_weights import calibrated_weights, nearest_weights
from common.model.calibration.token_ids import calibration_sequences, text_digest
from common.model.checkpoint import named_errors
from common.model.config_json import config_to_json
from common.model.model_cache import Progress, entry_checksums, entry_key, open_or_build
from common.model.prepared import PreparedModel
from common.model.rotation import ROTATION, RotatedModel, rotate, rotated_model
from common.model.weight_rounding import ROUNDING
from common.model.weights import load_weights
from kernels.contract import INT8_ATTENTION
from kernels.ops import Ops, select

QUANTIZED_WEIGHTS = "int8_weights.safetensors"
_FORMAT_VERSION = 2
"""Rises whenever the same rotated weights would be quantized or written differently."""
_QUANTIZED_BYTES_PER_S = 2e7  # on a small machine; for the announcement only
_MIN_CALIBRATION_TOKENS = 256
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    rotated: RotatedModel  # with the weights of its products quantized, as `Transformer` takes them
    name: str  # of how they were made, and the digest of what came out: equal names mean equal weights


def load_quantized(
    prepared: PreparedModel, cache_dir: Path, device: torch.device, progress: Progress
) -> QuantizedModel:
    """On the CPU the weights are mapped. Errors as of `prepare_quantized`."""
    entry = prepare_quantized(prepared, cache_dir, progress)
    file = entry / QUANTIZED_WEIGHTS
    with named_errors(file):
        rotated = rotated_model(prepared.config, load_file(file, device=str(device)))
    digest = entry_checksums(entry)[QUANTIZED_WEIGHTS]
    return QuantizedModel(rotated, f"{ROTATION}-{ROUNDING}-{INT8_ATTENTION}-{digest}")


def prepare_quantized(prepared: PreparedModel, cache_dir: Path, progress: Progress) -> Path:
    """The cache entry that holds QUANTIZED_WEIGHTS, verified; made where it is absent or damaged.

    Making it needs the CPU kernels, which `cache_dir` keeps too. Safe in several processes at once. Raises
    ModelLoadError when weights cannot be read or the cache not be written.
    """

    def build(folder: Path) -> None:
        num_bytes = sum(file.stat().st_size for file in prepared.weight_files)
        progress(f"quantizing {prepared.name} (about {1 + round(num_bytes / _QUANTIZED_BYTES_PER_S)} s, once) ...")
        started = time.monotonic()
        rotated = rotate(prepared.config, load_weights(prepared, _CPU))
        _write(dict(_quantized(prepared, rotated, cache_dir, progress)), folder / QUANTIZED_WEIGHTS)
        progress(f"quantized {prepared.name} in {time.monotonic() - started:.0f} s")

    return open_or_build(cache_dir / "models", _entry_key(prepared), build, progress)


def _quantized(
    prepared: PreparedModel, rotated: RotatedModel, cache_dir: Path, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    sequences = calibration_sequences(prepared)
    num_tokens = sum(map(len, sequences))
    if num_tokens < _MIN_CALIBRATION_TOKENS:
        progress(
            f"{prepared.name}: weights are rounded to nearest, since its tokenizer makes only {num_tokens} tokens of "
            f"the calibration text; at least {_MIN_CALIBRATION_TOKENS} are needed"
        )
        return nearest_weights(rotated.weights)
    return calibrated_weights(rotated, _cpu_ops(cache_dir), sequences)


def _cpu_ops(cache_dir: Path) -> Ops:
    """Those whose results depend on neither the number of threads nor the kind of CPU."""
    try:
        return select(_CPU, "cpu", cache_dir)
    except ValueError as error:  # kernels know nothing of our errors
        raise ModelLoadError(f"quantizing needs the CPU kernels: {error}") from error


def _write(weights: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(weights, file)
    except SafetensorError as error:  # a full disk, too
        raise ModelLoadError(f"cannot write {file}: {error}") from error


def _entry_key(prepared: PreparedModel) -> str:
    """Beside the weights' digest the configuration: no weight says how wide a head is, and its rotation is so wide.
    The tokenizer decides what the calibration text is to the model."""
    identity = {
        "format": _FORMAT_VERSION,
        "weights": prepared.weights_digest.hex(),
        "config": config_to_json(prepared.config).decode(),
        "tokenizer": prepared.tokenizer_digest.hex(),
        "calibration": text_digest(),
    }
    return entry_key(f"{prepared.name}-int8-{ROTATION}-{ROUNDING}-{INT8_ATTENTION}", identity)
