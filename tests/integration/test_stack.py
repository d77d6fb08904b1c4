"""The whole system as its user starts it: real processes, a tiny random model, the public HTTP API."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import redis

from bench.replay.__main__ import main as replay
from common.telemetry import names
from tests.support.redis_server import running_redis
from tests.support.stack_process import StackProcess, read_until, stack_process
from tests.support.tiny_models import make_tiny_model

PROMPTS = [
    "The engine takes a prompt, compresses it in one stroke and delivers the answer in the other.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 0 1 2 3 4 5 6 7 8 9 10 11 12 0 1 2 3",
    "Größe, façade, naïve, señor.",
    "a",
    "What is the capital of France? " * 12,
]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[StackProcess]:
    with stack_process(tmp_path_factory.mktemp("state"), "1p1d", tiny_model) as running:
        yield running


@pytest.fixture(autouse=True)
def baseline(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used the stack no worker runs anything, and every block is free or cached."""
    yield
    if "stack" in request.fixturenames:
        running: StackProcess = request.getfixturevalue("stack")
        running.await_idle()
        for worker, load in running.workers().items():
            assert load["free_blocks"] == running.num_blocks[worker], f"{worker} leaked blocks: {load}"


def answers(running: StackProcess, **parameters: object) -> list[dict[str, object]]:
    found = []
    for prompt in PROMPTS:
        body = running.complete(prompt, **{**GREEDY, **parameters})
        assert body["status"] == 200, body
        found.append(body["choices"][0])
    return found


def answers_in_a_crowd(running: StackProcess) -> list[list[dict[str, object]]]:
    """Greedy, then sampled from a cold and from a warm cache, while others are answered in the same batches."""
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(running.complete, f"{n} {PROMPTS[4]}", max_tokens=40) for n in range(8)]
        found = [answers(running), answers(running, **SAMPLED), answers(running, **SAMPLED)]
        assert all(future.result()["status"] == 200 for future in crowd)
    return found


def test_the_answer_depends_on_neither_company_topology_nor_speculation(
    stack: StackProcess, tiny_model: str, tmp_path: Path
) -> None:
    """Tokens and log probabilities, to the bit."""
    expected = [answers(stack), answers(stack, **SAMPLED)]
    assert answers_in_a_crowd(stack) == [expected[0], expected[1], expected[1]]
    assert [answers(stack, speculation=False), answers(stack, speculation=False, **SAMPLED)] == expected
    with stack_process(tmp_path / "colocated", "colocated", tiny_model) as colocated:
        assert answers_in_a_crowd(colocated) == [expected[0], expected[1], expected[1]]
        assert "exact: false" not in colocated.log("decode-0")
        loads = colocated.workers()
        assert len(loads) == 1, "the monolith is decode alone"
        assert all(load["kv_bytes_moved"] == 0 for load in loads.values())
    with stack_process(tmp_path / "2p2d", "2p2d", tiny_model, "--no-speculation") as large:
        assert len(large.workers()) == 4
        assert answers_in_a_crowd(large) == [expected[0], expected[1], expected[1]]
        assert sum(load["num_draft_tokens"] for load in large.workers().values()) == 0


def test_blocks_move_and_decode_computes_no_prompt_token(stack: StackProcess) -> None:
    before = stack.workers()
    asking = {"x-twostroke-usage": "transfer"}
    body = stack.complete(PROMPTS[0] + " moved", asking, max_tokens=8, temperature=0, ignore_eos=True)
    stack.await_idle()
    after = stack.workers()
    grown = {w: {k: after[w][k] - before[w][k] for k in after[w]} for w in after}
    prefill = next(load for worker, load in grown.items() if "prefill" in worker)
    decode = next(load for worker, load in grown.items() if "decode" in worker)
    assert prefill["kv_bytes_moved"] == decode["kv_bytes_moved"] > 0
    assert decode["computed_prompt_tokens"] == 0
    usage = body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert prefill["computed_prompt_tokens"] == usage["prompt_tokens"] - cached
    assert usage["twostroke"]["kv_bytes"] == prefill["kv_bytes_moved"]
    assert usage["twostroke"]["exposed_transfer_ms"] > 0
    assert min(load["peak_memory_bytes"] for load in after.values()) > 2**24, "more than an interpreter needs"


def test_a_bit_that_flips_on_the_way_is_sent_again_and_the_answers_are_the_same(
    stack: StackProcess, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(stack)
    monkeypatch.setenv("TWOSTROKE_DECODE_FAULTS", "kv.frame_received:flip@0.5;seed=21")
    monkeypatch.setenv("TWOSTROKE_DECODE_ALLOW_FAULT_INJECTION", "true")
    with stack_process(tmp_path, "1p1d", tiny_model) as damaged:
        assert answers(damaged) == expected
        damaged.await_idle()
        loads = damaged.workers()
        assert all(load["num_refetched_blocks"] > 0 for load in loads.values())
        assert [load["computed_prompt_tokens"] for worker, load in loads.items() if "decode" in worker] == [0]
        assert 'twostroke_fallbacks_total{reason="blocks_refetched"}' in damaged.client.get("/metrics").text
        assert "FAULT INJECTED point=kv.frame_received kind=flip" in damaged.log("decode-0")


def test_a_replay_tells_what_the_hand_off_cost_each_request(stack: StackProcess, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    trace = (
        "--arrivals closed --num-clients 2 --num-requests 6 --warm-up 1 --max-input 100 --min-output 6 --max-output 9"
    )
    tokens = "--first-token-id 3 --last-token-id 300"
    assert replay(["--url", stack.url, "--out", str(out), *trace.split(), *tokens.split()]) == 0
    result = json.loads(out.read_text())
    overall, server = result["report"]["overall"], result["server"]
    assert 0 < overall["kv_bytes"] == server["kv_bytes_moved"]
    assert overall["exposed_transfer_ms"]["count"] == overall["num_completed"] == 6
    assert server["peak_memory_bytes"].keys() == {"gateway", "prefill-0", "decode-0"}


def test_a_repeated_prompt_is_a_prefix_hit_and_counts_as_one(stack: StackProcess) -> None:
    prompt = "Once upon a time there was a small machine that could answer questions about everything it had read."
    first = stack.complete(prompt, max_tokens=4, temperature=0)
    again = stack.complete(prompt, max_tokens=4, temperature=0)
    details = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, again)]
    num_prompt = first["usage"]["prompt_tokens"]
    assert details == [0, (num_prompt - 1) // 16 * 16]
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_seed_gives_the_same_text_every_time_and_in_a_crowd(stack: StackProcess) -> None:
    parameters = {"temperature": 1.0, "top_p": 0.95, "seed": 1234, "max_tokens": 24, "ignore_eos": True}
    alone = stack.complete(PROMPTS[0], **parameters)
    assert alone["headers"]["x-twostroke-seed"] == "1234"
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda n: stack.complete(f"{n} {PROMPTS[2]}", max_tokens=16), range(8)))
        again = pool.submit(stack.complete, PROMPTS[0], **parameters).result()
    assert all(body["status"] == 200 for body in crowd)
    assert again["choices"][0]["text"] == alone["choices"][0]["text"]
    drawn = stack.complete(PROMPTS[0], temperature=1.0, max_tokens=24, ignore_eos=True)
    repeated = stack.complete(
        PROMPTS[0], temperature=1.0, max_tokens=24, ignore_eos=True, seed=int(drawn["headers"]["x-twostroke-seed"])
    )
    assert repeated["choices"][0]["text"] == drawn["choices"][0]["text"], (
        "a drawn seed is returned and can be used again"
    )


def test_short_answers_in_a_crowd_are_no_failures(stack: StackProcess) -> None:
    """Of two calls on two connections decode's may be over before prefill's first token is read."""

    def ask(number: int) -> dict[str, object]:
        return stack.complete(f"{number} {PROMPTS[2]}", max_tokens=1 + number % 3, ignore_eos=True)

    with ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(ask, range(96)))
    assert {body["status"] for body in bodies} == {200}
    assert {body["headers"].get("x-twostroke-fallback") for body in bodies} == {None}
    assert [body["usage"]["completion_tokens"] for body in bodies] == [1 + number % 3 for number in range(96)]


def test_speculation_takes_fewer_target_passes_on_text_that_repeats(stack: StackProcess) -> None:
    def steps(**parameters: object) -> float:
        decode = next(worker for worker in stack.workers() if "decode" in worker)
        before = stack.workers()[decode]["num_steps"]
        stack.complete(PROMPTS[1], temperature=0, max_tokens=200, ignore_eos=True, **parameters)
        stack.await_idle()
        return stack.workers()[decode]["num_steps"] - before

    # A greedy tiny model soon walks in a circle, which prompt lookup finds.
    assert steps(speculation=True) < steps(speculation=False) == 199


def test_one_trace_over_all_hops_and_its_parts_add_up_to_the_ttft(stack: StackProcess) -> None:
    body = stack.complete(f"A prompt of its own: {PROMPTS[4]}", max_tokens=8, temperature=0, ignore_eos=True)
    trace_id = body["headers"]["x-twostroke-trace-id"]
    wanted = {
        names.SPAN_REQUEST,
        names.SPAN_TOKENIZE,
        names.SPAN_PLACE,
        names.SPAN_RESERVE,
        names.SPAN_PREFILL_QUEUE,
        names.SPAN_PREFILL_CHUNK,
        names.SPAN_KV_PUSH,
        names.SPAN_KV_COMMIT,
        names.SPAN_DECODE_QUEUE,
        names.SPAN_DECODE_STREAM,
    }
    spans = stack.spans(trace_id)
    while not wanted <= {span.name for span in spans}:  # the files are written a moment later
        spans = stack.spans(trace_id)
    assert {span.service for span in spans} == {"twostroke-gateway", "twostroke-prefill", "twostroke-decode"}
    request = next(span for span in spans if span.name == names.SPAN_REQUEST)
    ttft = float(request.attributes[names.ATTR_TTFT])
    parts = sum(float(request.attributes[part]) for part in names.TTFT_PARTS)
    assert parts == pytest.approx(ttft, rel=0.05)
    # The workers' own spans say the same of the parts that are theirs.
    chunks = sum(span.end_ns - span.start_ns for span in spans if span.name == names.SPAN_PREFILL_CHUNK) / 1e9
    assert chunks <= float(request.attributes["twostroke.ttft.prefill_s"]) <= ttft


def test_the_openai_client_streams_and_cancels(stack: StackProcess) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=20
        )
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        running = client.completions.create(
            model=model, prompt=PROMPTS[0], max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(running))
        running.close()  # the fixture waits until every block is back


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"model": 5}',
        b'{"model": "tiny", "prompt": ""}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": -1}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e400}',
        b'{"model": "tiny", "prompt": [99999999]}',
        b'{"model": "tiny", "prompt": "a", "seed": 1' + b"0" * 60 + b"}",
        b'{"model": "tiny", "prompt": "' + b"a " * 500_000 + b'"}',
        b'{"model": "nobody", "prompt": "a"}',
        b'{"model": "tiny", "prompt": "a", "kv_transfer_params": {}}',
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
def test_bad_input_is_a_clear_4xx(stack: StackProcess, body: bytes) -> None:
    model = stack.client.get("/v1/models").json()["data"][0]["id"]
    body = body.replace(b'"tiny"', f'"{model}"'.encode())
    response = stack.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert error["message"]
    assert error["type"]


def test_many_clients_that_hang_up_at_any_time_leave_nothing_behind(stack: StackProcess) -> None:
    model = stack.client.get("/v1/models").json()["data"][0]["id"]

    def hang_up(number: int) -> None:
        body = {
            "model": model,
            "prompt": f"{number} {PROMPTS[4]}",
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
        }
        with (
            httpx.Client(base_url=stack.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            for _ in range(number % 7):
                next(lines, None)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hang_up, range(48)))


def test_a_worker_that_dies_comes_back_and_a_gateway_that_dies_is_named_and_the_stack_ends(
    tiny_model: str, tmp_path: Path
) -> None:
    with stack_process(tmp_path, "1p1d", tiny_model) as running:
        os.kill(pid_of(running, "decode_svc"), signal.SIGKILL)
        read_until(running.process, "decode-0 was killed by signal 9; it is started again")
        read_until(running.process, "decode-0 is ready again")
        while running.client.get("/readyz").status_code != 200:
            pass  # the gateway meets it within seconds; the test's time-out is the limit
        assert running.complete(PROMPTS[0], max_tokens=2)["status"] == 200
        os.kill(pid_of(running, "gateway"), signal.SIGKILL)
        output, _ = running.process.communicate(timeout=60)
        assert running.process.returncode == 1
        assert "gateway was killed by signal 9" in output
        assert "INFO gateway" in output, "the end of its log"


def pid_of(running: StackProcess, module: str) -> int:
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    return next(int(c) for c in children if module in Path(f"/proc/{c}/cmdline").read_text().split("\0"))


def test_redis_routes_by_prefix_and_its_loss_fails_no_request(tiny_model: str, tmp_path: Path) -> None:
    with (
        running_redis(tmp_path) as server,
        redis.Redis.from_url(server.url) as store,
        stack_process(tmp_path / "state", "2p2d", tiny_model, "--redis-url", server.url) as running,
    ):
        homes = set()
        for _ in range(4):
            body = running.complete(PROMPTS[4], max_tokens=2, temperature=0)
            homes.add(body["headers"]["x-twostroke-prefill-worker"])
            running.await_idle()
            while not store.keys("twostroke:*"):
                pass
        assert len(homes) == 1, "the prompt went where its blocks were"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        server.kill()
        for prompt in PROMPTS:
            assert running.complete(prompt, max_tokens=4)["status"] == 200
        assert "twostroke_prefix_index_available 0.0" in running.client.get("/metrics").text
