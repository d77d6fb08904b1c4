"""From checked bodies to token ids and sampling: what depends on the model. Nothing is allocated before it passes."""

from collections.abc import Callable, Sequence

from common.errors import BadRequest, ContextLengthExceeded
from common.sampling import SamplingParams
from common.tokenizer import Tokenizer
from gateway.off_loop import ResultT, in_thread_if
from gateway.schemas import ChatMessage, GenerationBody
from gateway.served_model import ModelCard, ServedModel
from gateway.values import Prompt

INLINE_CHARS = 1024
"""Longer texts are tokenized in a thread, so that other streams go on meanwhile; for shorter ones that costs more."""

HUGE_CHARS = 65_536
"""Longer texts are tokenized one at a time: each takes hundreds of bytes of memory for each of its characters."""

MESSAGE_CHARS = 64
"""What a message of a conversation costs beside its content, in characters."""

TokenIds = tuple[int, ...]


async def tokenize_prompts(served: ServedModel, prompts: Sequence[Prompt]) -> list[TokenIds]:
    """Texts get the special tokens that the tokenizer puts around a text; token ids are taken as they are."""

    def tokenize() -> list[TokenIds]:
        return [_token_ids(served, prompt) for prompt in prompts]

    return await _compute(served, sum(map(len, prompts)), tokenize)


async def tokenize_chat(served: ServedModel, messages: Sequence[ChatMessage]) -> TokenIds:
    """The conversation by the model's chat template. A `developer` message is a system message to it."""

    def tokenize() -> TokenIds:
        plain = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
        return _encode(served, served.tokenizer.render_chat(plain), add_special_tokens=False)

    return await _compute(served, sum(len(message.content) + MESSAGE_CHARS for message in messages), tokenize)


def sampling_for(
    body: GenerationBody, served: ServedModel, num_prompt_tokens: int, default_max_tokens: int | None, seed: int
) -> SamplingParams:
    """`default_max_tokens` None: as many as fit after the prompt."""
    vocab_size = served.card.vocab_size
    for token_id in body.logit_bias:
        if token_id >= vocab_size:
            raise BadRequest(f"logit_bias names token {token_id}; {_valid_ids(vocab_size)}", param="logit_bias")
    return SamplingParams(
        seed=seed,
        max_tokens=_max_tokens(body.requested_tokens, served.card, num_prompt_tokens, default_max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop_token_ids=frozenset() if body.ignore_eos else served.tokenizer.meta.eos_token_ids,
        num_logprobs=body.num_logprobs,
        speculation=body.speculation,
    )


async def _compute(served: ServedModel, num_chars: int, tokenize: Callable[[], ResultT]) -> ResultT:
    if num_chars <= HUGE_CHARS:
        return await in_thread_if(num_chars > INLINE_CHARS, tokenize)
    async with served.huge_texts:
        return await in_thread_if(True, tokenize)


def _token_ids(served: ServedModel, prompt: Prompt) -> TokenIds:
    if isinstance(prompt, str):
        return _encode(served, prompt, add_special_tokens=True)
    _check_prompt(served.card, prompt)
    return prompt


def _encode(served: ServedModel, text: str, *, add_special_tokens: bool) -> TokenIds:
    _check_chars(served.card, served.tokenizer, text)
    token_ids = tuple(served.tokenizer.encode(text, add_special_tokens=add_special_tokens))
    _check_prompt(served.card, token_ids)
    return token_ids


def _check_chars(card: ModelCard, tokenizer: Tokenizer, text: str) -> None:
    """Refuses what is far too long before memory and time are spent on finding out by how much."""
    most = card.max_model_len * tokenizer.longest_token_chars
    if len(text) > most:
        raise ContextLengthExceeded(
            f"the prompt has {len(text)} characters; model {card.name} takes at most {card.max_model_len - 1} tokens, "
            f"and a prompt of more than {most} characters is refused unread"
        )


def _check_prompt(card: ModelCard, token_ids: TokenIds) -> None:
    if not token_ids:
        raise BadRequest("the prompt has no tokens; it needs at least one", param="prompt")
    if len(token_ids) >= card.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(token_ids)} tokens; model {card.name} takes at most {card.max_model_len - 1}, "
            f"and {card.max_model_len} with the output"
        )
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= card.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadRequest(f"the prompt has the token id {wrong}; {_valid_ids(card.vocab_size)}", param="prompt")


def _valid_ids(vocab_size: int) -> str:
    return f"the vocabulary has {vocab_size} tokens, with ids from 0 to {vocab_size - 1}"


def _max_tokens(requested: int | None, card: ModelCard, num_prompt_tokens: int, default: int | None) -> int:
    room = card.max_model_len - num_prompt_tokens
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {requested}, together "
            f"{num_prompt_tokens + requested}; model {card.name} takes at most {card.max_model_len}",
            param="max_tokens",
        )
    return requested
