from collections.abc import Iterator

import pytest

from cli.__main__ import main
from tests.support.stand_in_gateway import StandInGateway, stand_in_gateway


@pytest.fixture
def gateway() -> Iterator[StandInGateway]:
    with stand_in_gateway("Hello", " you") as server:
        yield server


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    remaining = iter(lines)

    def read(prompt: str) -> str:
        line = next(remaining, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)


def test_the_conversation_grows_by_questions_and_answers(
    gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "Hi", "", "  Again ")
    assert main(["chat", "--url", gateway.url, "--system", "Be brief", "--seed", "7", "--temperature", "0"]) == 0
    assert [message["content"] for message in gateway.bodies[1]["messages"]] == ["Be brief", "Hi", "Hello you", "Again"]
    assert [message["role"] for message in gateway.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert (gateway.bodies[0]["seed"], gateway.bodies[0]["temperature"], gateway.bodies[0]["model"]) == (7, 0, "small")
    assert capsys.readouterr().out.count("Hello you\n") == 2


def test_nobody_there_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with stand_in_gateway() as gone:
        url = gone.url
    assert main(["chat", "--url", url]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"twostroke: {url}: ")
    assert message.count("\n") == 1
