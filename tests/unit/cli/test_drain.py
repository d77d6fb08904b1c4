"""`twostroke drain` against a gateway that answers as told; the whole way is `make rolling`."""

import time
from collections.abc import Callable

import httpx
import pytest

from cli import drain
from cli.errors import CommandError

DRAINED = {"id": "decode-0", "address": "127.0.0.1:1", "incarnation": "aa", "num_sequences": 2, "grace_s": 30.0}
URL = "http://127.0.0.1:8000"


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url=URL, transport=httpx.MockTransport(answer))


def listing(*workers: tuple[str, str]) -> httpx.Response:
    return httpx.Response(200, json={"workers": [{"incarnation": i, "state": state} for i, state in workers]})


@pytest.mark.parametrize(("worker", "path"), [("decode-0", "decode-0"), ("10.0.0.1:50051", "10.0.0.1%3A50051")])
@pytest.mark.parametrize("force", [False, True])
def test_the_worker_is_named_in_the_path(worker: str, path: str, force: bool) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=DRAINED)

    assert drain._drain(client(answer), worker, force) == DRAINED
    [request] = asked
    assert (request.method, request.url.raw_path.decode().partition("?")[0]) == (
        "PUT",
        f"/operations/workers/{path}/drain",
    )
    assert request.url.params.get("force") == ("true" if force else None)


@pytest.mark.parametrize("workers", [[], [("bb", "ready")], [("aa", "lost")], [("bb", "ready"), ("aa", "lost")]])
def test_it_is_gone_when_no_ready_worker_has_its_incarnation(workers: list[tuple[str, str]]) -> None:
    drain._await_end(client(lambda _: listing(*workers)), DRAINED, time.monotonic() + 60)


def test_one_that_stays_is_an_error_after_the_grace_period() -> None:
    with pytest.raises(CommandError, match="decode-0 is still there"):
        drain._await_end(client(lambda _: listing(("aa", "ready"))), DRAINED, time.monotonic() - 1)


def test_a_refusal_says_what_the_gateway_said_and_nobody_there_is_named() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": {"message": "there is no worker 'x' here"}})

    def fail(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(CommandError, match="404: there is no worker 'x' here"):
        drain._drain(client(refuse), "x", False)
    with pytest.raises(CommandError, match=f"{URL}.*connection refused; is a stack running"):
        drain._drain(client(fail), "x", False)
