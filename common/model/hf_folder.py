"""A Hugging Face folder: its files, and its description in our terms. The weights stay where they are."""

from pathlib import Path
from typing import Any

from common.errors import ModelLoadError
from common.model.config import ModelConfig
from common.model.config_json import read_json_object
from common.model.families import check_supported, to_model_config, token_ids
from common.model.tokenizer_export import ExportedTokenizer, export_folder_tokenizer
from common.model.transformers_seam import transformers_seam

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DESCRIBING_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def describing_files(folder: Path) -> tuple[Path, ...]:
    """The small files that configuration and tokenizer are read from, by name."""
    return tuple(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _DESCRIBING_SUFFIXES))


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files, one or all shards; ModelLoadError names what is missing."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return (single,)
    if index.is_file():
        return _shards(folder, index)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if others:
        raise ModelLoadError(f"{folder} has its weights as {others[0]} only; {_SINGLE} is supported")
    raise ModelLoadError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}")


def read_raw_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands; ModelLoadError where it is missing, unreadable or of a model that is not supported."""
    file = folder / CONFIG
    if not file.is_file():
        raise ModelLoadError(f"{folder} has no {CONFIG}; it is not a Hugging Face folder")
    raw = read_json_object(file)
    check_supported(raw, file)
    return raw


def describe_folder(folder: Path, name: str) -> tuple[ModelConfig, ExportedTokenizer]:
    """Needs transformers. ModelLoadError names the file and what is wrong with it or not supported."""
    file = folder / CONFIG
    raw = read_raw_config(folder)
    with transformers_seam(file, "reading the configuration"):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer = export_folder_tokenizer(folder)
    with transformers_seam(file, "reading the configuration"):
        return _model_config(name, config, raw, folder, tokenizer), tokenizer


def _model_config(
    name: str, config: Any, raw: dict[str, Any], folder: Path, tokenizer: ExportedTokenizer
) -> ModelConfig:
    # The classes' own default ids are one checkpoint's; only what the files say counts.
    generation_file = folder / GENERATION_CONFIG
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    eos_token_ids = [
        *token_ids(raw.get("eos_token_id")),
        *token_ids(generation.get("eos_token_id")),
        *token_ids(tokenizer.eos_token_id),
    ]
    bos_token_id = raw.get("bos_token_id") if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return to_model_config(name, config, folder / CONFIG, eos_token_ids, bos_token_id)


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: weight file {name!r} is not a plain file name")
        if not (folder / name).is_file():
            raise ModelLoadError(f"{folder / name} is missing; {index.name} names it")
    return tuple(folder / name for name in names)
