"""`demo`, `run` and `trace` as a newcomer starts them, with a tiny model: what they print, how they end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from common.telemetry import names
from tests.support.stack_process import free_port
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama"))


def start(state: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "TWOSTROKE_STATE_DIR": str(state),
        "OMP_NUM_THREADS": "2",
        "OTEL_SDK_DISABLED": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def left_behind(state: Path) -> list[str]:
    """Command lines of processes that were started for this state folder."""
    mark = f"TWOSTROKE_STATE_DIR={state}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is somebody else's
    return found


def test_demo_answers_tells_where_the_time_went_and_leaves_nothing(model: str, tmp_path: Path) -> None:
    port = str(free_port())
    with start(tmp_path, "demo", "--port", port, "--model", model, "--kv-memory-mib", "64") as process:
        output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert left_behind(tmp_path) == []
    answer = output.split("Answer: ", 1)[1].split("First text after", 1)[0]
    assert answer.strip(), "the answer was shown"
    for line in ("TTFT", "queue", "prefill", "transfer", "TPOT"):
        assert re.search(rf"^ +{line} +[0-9.]+ ms", output, re.MULTILINE), f"{line} is not in:\n{output}"
    with start(tmp_path, "trace") as process:
        drawn, _ = process.communicate(timeout=60)
    assert process.returncode == 0, drawn
    spans = (names.SPAN_REQUEST, names.SPAN_RESERVE, names.SPAN_PREFILL_CHUNK, names.SPAN_KV_COMMIT)
    for span in (*spans, names.SPAN_DECODE_STREAM):
        assert span in drawn
    assert "TTFT" in drawn
    assert "TPOT" in drawn


def test_run_serves_after_its_answer_until_it_is_interrupted(model: str, tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "run", "--port", str(port), "--model", model, "--kv-memory-mib", "64") as process:
        assert process.stdout is not None
        seen = [next(process.stdout)]
        while "Serving on" not in seen[-1]:
            seen.append(next(process.stdout))
        assert any(line.startswith("Answer: ") for line in seen)
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).json() == {"status": "ready"}
        assert len(left_behind(tmp_path)) >= 5, "the supervisor, the index, two workers and the gateway"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "no process is left" in output
    assert left_behind(tmp_path) == []


def test_a_model_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model.gguf"
    with start(tmp_path, "demo", "--port", str(free_port()), "--model", str(missing)) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert str(missing) in output
    assert "Traceback" not in output
