"""The calibration text in a model's own tokens."""

from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from common.model.prepared import PreparedModel
from common.model.tokenizer_export import TOKENIZER_JSON

_TOKENS_PER_STYLE = 1024
_SEQUENCE_TOKENS = 512


def calibration_sequences(prepared: PreparedModel) -> list[list[int]]:
    """Token ids below the vocabulary size, at most _SEQUENCE_TOKENS in a sequence. The same every time."""
    tokenizer = Tokenizer.from_str(prepared.tokenizer_files[TOKENIZER_JSON].decode())
    length = min(_SEQUENCE_TOKENS, prepared.config.max_model_len)
    sequences = []
    for text in _texts():
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:_TOKENS_PER_STYLE]
        # A tokenizer may know more tokens than the model has rows for; any row does for calibration.
        known = [token_id % prepared.config.vocab_size for token_id in token_ids]
        sequences += [known[start : start + length] for start in range(0, len(known), length)]
    return sequences


def text_digest() -> str:
    """Hex: names the calibration text."""
    digest = blake2b(digest_size=16)
    for text in _texts():
        digest.update(blake2b(text.encode(), digest_size=16).digest())
    return digest.hexdigest()


def _texts() -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.txt"))]
