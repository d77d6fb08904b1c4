"""A model's tokenizer, from the two files that every worker can send."""

from collections.abc import Mapping, Sequence

import tokenizers

from common.errors import BadRequest, ModelLoadError
from common.tokenizer.chat_template import ChatTemplate
from common.tokenizer.detokenizer import IncrementalDetokenizer
from common.tokenizer.meta import TokenizerMeta
from common.tokenizer.token_bytes import token_to_bytes


class Tokenizer:
    """Immutable to its users, and safe to share between threads.

    Text that spells a special token (`<|im_end|>`) becomes that token wherever it stands, in the content of a chat
    message too. That is what transformers does, and equality with it is the promise here. So a client can write turns
    of its own into its own conversation; it cannot reach another client's.
    """

    def __init__(self, tokenizer_json: bytes, meta: bytes) -> None:
        """The contents of `tokenizer.json` and `tokenizer_meta.json`. ModelLoadError says what is wrong with them."""
        self.meta = TokenizerMeta.from_json(meta)
        self._tokenizer = _load(tokenizer_json)
        self._token_to_bytes = token_to_bytes(tokenizer_json)
        self.longest_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        added = self._tokenizer.get_added_tokens_decoder()
        # A token that ends a request is no text either, whatever its flags say.
        self._hidden_ids = (
            frozenset(token_id for token_id, token in added.items() if token.special)
            | self.meta.special_token_ids
            | self.meta.eos_token_ids
        )
        self._bytes_of_id: dict[int, bytes] = {}
        self._chat_template = _chat_template(self.meta)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile. Precondition: `text` has no lone surrogates."""
        # The batch call is the one that lets go of the interpreter's lock, and it computes no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text, special tokens included: encode it with `add_special_tokens=False`.

        Raises BadRequest when the model has no chat template, or when that refuses the messages.
        """
        if self._chat_template is None:
            raise BadRequest(f"model {self.meta.model_name} has no chat template; use /v1/completions", param="model")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a conversation whose next turn is the assistant's."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text: nothing for special tokens and for ids without a token."""
        return b"" if token_id in self._hidden_ids else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The token itself, special ones spelled out; empty for an id without a token."""
        known = self._bytes_of_id.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._bytes_of_id[token_id] = b"" if token is None else self._token_to_bytes(token)
        return known

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.text_bytes)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an output: special tokens skipped, U+FFFD for what is not UTF-8.

        A text that starts with the space of a SentencePiece token keeps it, since an output continues its prompt.
        """
        return b"".join(map(self.text_bytes, token_ids)).decode("utf-8", errors="replace")


def _load(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except ValueError as error:
        raise ModelLoadError(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chat_template(meta: TokenizerMeta) -> ChatTemplate | None:
    if meta.chat_template is None:
        return None
    special_tokens = {"bos_token": meta.bos_token, "eos_token": meta.eos_token}
    return ChatTemplate(meta.chat_template, {name: token for name, token in special_tokens.items() if token})
