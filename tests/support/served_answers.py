"""A running stack and, of the same model, what it must answer: asked and compared token by token."""

import json
from dataclasses import dataclass
from typing import Any

from common.sampling import OutputToken, SamplingParams
from gateway.token_text import spell
from tests.support.plain_answers import PlainAnswers
from tests.support.stack_process import StackProcess

PROMPT = "The engine takes a prompt, compresses it in one stroke and delivers the answer in the other."
NUM_TOKENS = 24
Case = dict[str, Any]


@dataclass(frozen=True)
class Served:
    stack: StackProcess
    plain: PlainAnswers

    def ask(self, **parameters: Any) -> dict[str, Any]:
        wanted: Case = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3} | parameters
        body = self.stack.complete(**wanted)
        assert body["status"] == 200, body
        return body

    def expect(self, **parameters: Any) -> list[OutputToken]:
        wanted: Case = {"max_tokens": NUM_TOKENS, "num_logprobs": 3} | parameters
        return self.plain.tokens(self.plain.encode(PROMPT), SamplingParams(**wanted))

    def check(self, choice: dict[str, Any], **parameters: Any) -> None:
        assert choice["logprobs"]["tokens"] == [self.spell(token) for token in self.expect(**parameters)]

    def spell(self, token: OutputToken) -> str:
        return spell(self.plain.tokenizer.token_bytes(token.token_id))

    def text(self, tokens: list[OutputToken]) -> str:
        return self.plain.tokenizer.decode([token.token_id for token in tokens])

    def stream(self, path: str = "/v1/completions", **parameters: Any) -> list[dict[str, Any]]:
        model = self.stack.client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True} | parameters
        response = self.stack.client.post(path, json=body)
        assert response.status_code == 200, response.text
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]
