"""A model's tokenizer as the two files that a gateway needs: tokenizer.json and tokenizer_meta.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from common.errors import ModelLoadError
from common.model.config import ModelConfig
from common.model.config_json import canonical_json
from common.model.gguf_header import GgufHeader
from common.model.transformers_seam import transformers_seam

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_META = "tokenizer_meta.json"
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_META)

_VOCABULARY_FILES = (TOKENIZER_JSON, "tokenizer.model", "vocab.json")
_GGUF_LINK = "model.gguf"
_GPT2_SPLITS = ("gpt-2", "gpt2")


@dataclass(frozen=True, slots=True)
class ExportedTokenizer:
    json: bytes  # tokenizer.json, as the `tokenizers` library reads it
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    special_token_ids: tuple[int, ...]

    def meta(self, config: ModelConfig) -> bytes:
        """tokenizer_meta.json."""
        return canonical_json(
            {
                "chat_template": self.chat_template,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
                "eos_token_ids": config.eos_token_ids,
                "bos_token_id": config.bos_token_id,
                "special_token_ids": self.special_token_ids,
                "vocab_size": config.vocab_size,
                "max_model_len": config.max_model_len,
                "model_name": config.name,
            }
        )


def export_folder_tokenizer(folder: Path) -> ExportedTokenizer:
    """Of a Hugging Face folder: its tokenizer.json where it has one, else what transformers converts to one."""
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelLoadError(f"{folder} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)}")
    file = folder / TOKENIZER_JSON
    if not file.is_file():
        loaded = _load(folder)
        return _export(loaded, loaded.backend_tokenizer, None)
    published = file.read_bytes()
    tokenizer = _parse(published, file)  # before transformers reads it: our error names the file
    return _export(_load(folder), tokenizer, published)


def export_gguf_tokenizer(header: GgufHeader, scratch: Path) -> ExportedTokenizer:
    """Of the GGUF file with this header. `scratch` is a folder for files that are gone afterwards."""
    split = _gguf_split(header)
    # transformers also reads what lies beside the file; through a link in a folder of its own there is nothing.
    with TemporaryDirectory(dir=scratch) as alone:
        (Path(alone) / _GGUF_LINK).symlink_to(header.path)
        with transformers_seam(header.path, "reading the tokenizer"):
            from transformers import PreTrainedTokenizerFast

            loaded = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=_GGUF_LINK, local_files_only=True)
    backend: Tokenizer = loaded.backend_tokenizer
    if split is not None:
        backend.pre_tokenizer = split
    return _export(loaded, backend, None)


def _load(folder: Path) -> Any:
    with transformers_seam(folder, "reading the tokenizer"):
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ModelLoadError(f"{folder}: {type(loaded).__name__} cannot be written as {TOKENIZER_JSON}")
    return loaded


def _parse(data: bytes, file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ModelLoadError(f"{file} is not a tokenizer: {error}") from error


def _export(loaded: Any, tokenizer: Tokenizer, published: bytes | None) -> ExportedTokenizer:
    if published is None or tokenizer.truncation or tokenizer.padding:
        # A published file may cut or pad its input, as it did in training; a server must do neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        published = tokenizer.to_str().encode()
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special} | set(loaded.all_special_ids)
    return ExportedTokenizer(
        json=published,
        chat_template=_default_template(loaded.chat_template),
        bos_token=loaded.bos_token,
        eos_token=loaded.eos_token,
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        special_token_ids=tuple(sorted(special)),
    )


def _default_template(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


def _gguf_split(header: GgufHeader) -> pre_tokenizers.PreTokenizer | None:
    """How a byte-level vocabulary's text is cut before merging, where transformers does not know; None where it does.

    A wrong cut gives other tokens than the model was trained on, without any error; so a file that names none, or one
    that is unknown, is refused.
    """
    name = header.metadata.get("tokenizer.ggml.pre")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or name in _GPT2_SPLITS:
        return None
    if name == "smollm":  # each digit stands alone, the rest as GPT-2
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    known = _splits_known_to_transformers(header.path)
    if name not in known:
        raise ModelLoadError(
            f"{header.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(sorted((*known, *_GPT2_SPLITS, 'smollm')))}"
        )
    return None


def _splits_known_to_transformers(path: Path) -> Sequence[str]:
    with transformers_seam(path, "reading the tokenizer"):
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        return tuple(GGUF_PRE_TOKENIZER_SPLITS)
