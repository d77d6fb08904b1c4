"""Bodies that are allowed and heavy: they cost their sender time, never the other clients."""

import asyncio
import threading

import pytest

from common.tokenizer import Tokenizer
from gateway.prompts import HUGE_CHARS
from tests.support.gateway_app import TestGateway, assert_refused
from tests.support.tiny_tokenizers import MAX_MODEL_LEN, byte_level, meta_json

LONGEST_TEXT = MAX_MODEL_LEN * len("<|endoftext|>")


class WatchedTokenizer(Tokenizer):
    """Knows in which threads it encoded, and how often at the same time."""

    def __init__(self) -> None:
        super().__init__(byte_level().to_str().encode(), meta_json())
        self.threads: list[threading.Thread] = []
        self.most_at_once = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._at_once = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.current_thread())
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        assert self.may_go_on.wait(20)
        self._at_once -= 1
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


async def test_short_prompts_are_tokenized_in_place(tokenizer: WatchedTokenizer) -> None:
    gateway = TestGateway(tokenizer=tokenizer)
    await gateway.complete(prompt="hi")
    await gateway.chat()
    assert set(tokenizer.threads) == {threading.main_thread()}


async def test_a_conversation_of_many_empty_messages_is_long(tokenizer: WatchedTokenizer) -> None:
    gateway = TestGateway(tokenizer=tokenizer)
    await gateway.chat(messages=[{"role": "user", "content": ""}] * 100)
    assert tokenizer.threads
    assert threading.main_thread() not in tokenizer.threads


async def test_huge_prompts_are_tokenized_one_at_a_time(tokenizer: WatchedTokenizer) -> None:
    """And the short ones of others do not wait for them."""
    prompts = ["hi " * 600] * 60
    assert sum(map(len, prompts)) > HUGE_CHARS
    gateway = TestGateway(tokenizer=tokenizer)
    tokenizer.may_go_on.clear()
    huge = [asyncio.create_task(gateway.complete(prompt=prompts, max_tokens=1)) for _ in range(3)]
    while not tokenizer.threads:
        await asyncio.sleep(0)
    other = TestGateway()
    other.model.set(gateway.model.current())  # the same model, which is busy
    assert (await other.complete(prompt=[5, 6])).status_code == 200
    tokenizer.may_go_on.set()
    assert {response.status_code for response in await asyncio.gather(*huge)} == {400}, "600 tokens are too many"
    assert tokenizer.most_at_once == 1


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_far_beyond_the_model_s_length_is_refused_unread(tokenizer: WatchedTokenizer, chat: bool) -> None:
    gateway = TestGateway(tokenizer=tokenizer)
    text = "a" * (LONGEST_TEXT + 1)
    response = await (
        gateway.chat(messages=[{"role": "user", "content": text}]) if chat else gateway.complete(prompt=text)
    )
    assert_refused(response, 400, "context_length_exceeded", None, f"more than {LONGEST_TEXT} characters")
    assert not tokenizer.threads


async def test_a_text_of_just_that_length_is_read(tokenizer: WatchedTokenizer) -> None:
    response = await TestGateway(tokenizer=tokenizer).complete(prompt="a" * LONGEST_TEXT)
    assert_refused(response, 400, "context_length_exceeded", None, f"the prompt has {LONGEST_TEXT} tokens")


async def test_a_long_body_that_is_wrong_is_refused_as_a_short_one() -> None:
    gateway = TestGateway()
    for prompt in ("hi", "hi " * 10_000):
        assert_refused(await gateway.complete(prompt=prompt, n=0), 400, "invalid_value", "n", "n is 0")
        assert_refused(await gateway.post("/v1/completions", f'["{prompt}"'.encode()), 400, "invalid_value", None)
