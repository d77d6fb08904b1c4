"""A model that is ready to be served: what it is, which files hold its weights, and the digests that name it.

Opening one needs neither transformers nor torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import pack

from common.model.config import ModelConfig
from common.model.config_json import config_from_json, config_to_json
from common.model.tokenizer_export import TOKENIZER_FILES, TOKENIZER_JSON, TOKENIZER_META, ExportedTokenizer
from common.tokenizer_files import tokenizer_digest

DIGEST_BYTES = 32
CONFIG_FILE = "model_config.json"
_WEIGHTS_PERSON = b"twostroke-weight"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    name: str
    folder: Path  # of the prepared files; the weights may lie elsewhere
    config: ModelConfig
    weight_files: tuple[Path, ...]  # safetensors
    weights_digest: bytes  # 32 bytes
    tokenizer_files: Mapping[str, bytes]  # exactly tokenizer.json and tokenizer_meta.json
    tokenizer_digest: bytes  # 32 bytes, of tokenizer_files


def write_description(folder: Path, config: ModelConfig, tokenizer: ExportedTokenizer) -> None:
    """The files that `read_prepared` reads."""
    (folder / CONFIG_FILE).write_bytes(config_to_json(config))
    (folder / TOKENIZER_JSON).write_bytes(tokenizer.json)
    (folder / TOKENIZER_META).write_bytes(tokenizer.meta(config))


def read_prepared(folder: Path, weight_checksums: Sequence[tuple[Path, str]]) -> PreparedModel:
    """`weight_checksums`: each weight file and the SHA-256 (hex) of its content. Precondition: the folder's own
    checksums were verified."""
    config = config_from_json((folder / CONFIG_FILE).read_bytes())
    tokenizer_files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES}
    return PreparedModel(
        name=config.name,
        folder=folder,
        config=config,
        weight_files=tuple(path for path, _ in weight_checksums),
        weights_digest=weights_digest({path.name: checksum for path, checksum in weight_checksums}),
        tokenizer_files=tokenizer_files,
        tokenizer_digest=tokenizer_digest(tokenizer_files),
    )


def weights_digest(checksums: Mapping[str, str]) -> bytes:
    """BLAKE2b (32 bytes) over file names and SHA-256 digests, in the order of the names."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=_WEIGHTS_PERSON)
    for name in sorted(checksums):
        for part in (name.encode(), bytes.fromhex(checksums[name])):
            digest.update(pack("<Q", len(part)) + part)
    return digest.digest()
