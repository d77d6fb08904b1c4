"""`python -m bench.replay` against the gateway's real HTTP surface, with a scripted dispatcher behind it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from prometheus_client import Counter, Gauge

from bench.replay.__main__ import EXIT_REFUSED, EXIT_WRONG_SETTING, main
from common.errors import PeerLost
from common.sampling import FinishReason
from gateway.generation import Generation, TokenDelta
from tests.support.fake_dispatcher import Script, Step, says, tokens_of
from tests.support.gateway_app import TestGateway
from tests.support.tiny_tokenizers import MODEL_NAME, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ANSWER = says(TOKENIZER, "What is the capital of France? " * 4, num_cached_tokens=3, ends_with=FinishReason.LENGTH)
LENGTHS = "--max-input 100 --min-output 4 --max-output 8 --first-token-id 3 --last-token-id 300 --settle-s 0"


@asynccontextmanager
async def serving(gateway: TestGateway) -> AsyncIterator[str]:
    """The server's root. Connections wait in the listening socket until the server takes them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(gateway.app, log_config=None, lifespan="off", ws="none"))
        serve = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serve


async def replay(gateway: TestGateway, folder: Path, *arguments: str) -> int:
    async with serving(gateway) as url:
        out = ["--url", url, "--out", str(folder / "result.json"), "--html", str(folder / "page.html")]
        return await asyncio.to_thread(main, [*out, *LENGTHS.split(), *arguments])


def result_in(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return held


async def test_a_closed_loop_is_reported(tmp_path: Path) -> None:
    gateway = TestGateway(ANSWER)
    arguments = "--arrivals closed --num-clients 3 --num-requests 12 --warm-up 2 --shared-prefix-share 0.5"
    assert await replay(gateway, tmp_path, *arguments.split(), "--price-per-hour", "2") == 0
    result = result_in(tmp_path)
    overall = result["report"]["overall"]
    assert (result["model"], result["state"], result["server"]) == (MODEL_NAME, "warm", None)
    assert (overall["num_requests"], overall["num_completed"]) == (12, 12)
    assert overall["num_cached_tokens"] == 12 * 3
    replayed = gateway.dispatcher.generations[2:]
    assert overall["num_output_tokens"] == sum(generation.sampling.max_tokens for generation in replayed)
    assert overall["num_input_tokens"] == sum(len(generation.token_ids) for generation in replayed)
    assert overall["cost_per_million_output_tokens"] > 0
    assert result["configuration"]["trace"]["shared_prefix_share"] == 0.5
    for row in result["requests"]:
        assert row["queued_s"] <= row["sent_s"] <= row["first_byte_s"] <= row["ended_s"]
        assert row["ttft_s"] > 0
    assert len({row["request_digest"] for row in result["requests"]}) == 12
    answers = {(row["num_output_tokens"], row["answer_digest"]) for row in result["requests"]}
    assert len(answers) == len(dict(answers)) == len({digest for _, digest in answers}), "one text for each length"
    assert result["promise"] == {"numerics": "reference", "exact": False, "inexact_reason": "a reason"}
    content = (tmp_path / "result.json").read_text() + (tmp_path / "page.html").read_text()
    assert str(tmp_path) not in content
    assert "127.0.0.1" not in content
    assert socket.gethostname() not in content
    assert "<svg" in content


async def test_open_arrivals_with_cancellations(tmp_path: Path) -> None:
    gateway = TestGateway(ANSWER)
    arguments = "--rate-per-s 2000 --num-requests 16 --cancel-share 0.5 --objective-ttft-ms 60000"
    assert await replay(gateway, tmp_path, *arguments.split()) == 0
    overall = result_in(tmp_path)["report"]["overall"]
    assert overall["num_completed"] + overall["num_cancelled"] == 16
    assert overall["num_cancelled"] > 0
    assert overall["objectives_met_share"] == 1


async def test_text_prompts_and_a_recorded_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input,output\n0,20,4\n0.001,30,5\n")
    gateway = TestGateway(ANSWER)
    assert await replay(gateway, tmp_path, "--csv", str(trace), "--prompts", "text", "--state", "cold") == 0
    result = result_in(tmp_path)
    assert (result["trace"]["arrivals"], result["trace"]["num_requests"]) == ("recorded", 2)
    assert len(gateway.dispatcher.generations) == 2  # nothing warmed it up


def breaks(_: Generation) -> list[Step]:
    return [TokenDelta(tokens_of([20])), PeerLost("decode-0 is gone")]


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        (breaks, "--state cold", "4 of 4 requests failed (peer_lost)"),
        (ANSWER, "--warm-up 0", "had no warm-up"),
        (ANSWER, "--state cold --model other", "status_404"),
        (lambda _: [asyncio.Event()], "--state cold --timeout-s 0.2", "timed_out"),
    ],
)
async def test_a_refusal_is_named_and_leaves_no_result(
    script: Script, arguments: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--num-requests", "4", "--rate-per-s", "2000", *arguments.split()]
    assert await replay(TestGateway(script), tmp_path, *run) == EXIT_REFUSED
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("moves", [False, True])
async def test_a_disaggregated_run_must_move_kv(
    moves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(generation: Generation) -> list[Step]:
        if moves:
            moved.inc(1000)
            generation.transfer.add(1000, 0.5)
        return list(ANSWER(generation))

    gateway = TestGateway(script)
    labels = {"worker": "prefill-0", "role": "prefill"}
    Gauge("twostroke_worker_ready", "", [*labels], registry=gateway.registry).labels(**labels).set(1)
    moved = Counter("twostroke_worker_kv_bytes_moved", "", [*labels], registry=gateway.registry).labels(**labels)
    code = await replay(gateway, tmp_path, "--num-requests", "3", "--rate-per-s", "2000", "--warm-up", "1")
    if moves:
        assert code == 0
        result = result_in(tmp_path)
        overall = result["report"]["overall"]
        assert result["server"]["kv_bytes_moved"] == overall["kv_bytes"] == 3 * 1000  # the warm-up's are not the run's
        assert overall["exposed_transfer_ms"]["p50"] == 500
    else:
        assert code == EXIT_REFUSED
        assert "no KV moved although 1 prefill workers exist" in capsys.readouterr().err


async def test_a_wrong_setting_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await replay(TestGateway(ANSWER), tmp_path, "--cancel-share", "2") == EXIT_WRONG_SETTING
    assert "cancel_share is 2.0" in capsys.readouterr().err
