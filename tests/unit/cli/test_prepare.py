"""`twostroke prepare` makes ahead what a worker would make at its first start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli.__main__ import main
from common.model.loading import prepare_model
from common.model.quantized_model import load_quantized
from tests.support.tiny_models import make_tiny_model


def test_int8_weights_are_made_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, model = tmp_path / "cache", str(make_tiny_model(tmp_path / "tiny", "llama"))
    monkeypatch.setenv("TWOSTROKE_CACHE_DIR", str(cache))
    assert main(["prepare", "--model", model, "--numerics", "reference"]) == 0
    assert "quantizing" not in capsys.readouterr().out
    assert main(["prepare", "--model", model]) == 0
    assert "quantizing tiny" in capsys.readouterr().out

    def silent(line: str) -> None:
        pytest.fail(f"unexpected progress: {line}")

    load_quantized(prepare_model(model, cache, silent), cache, torch.device("cpu"), silent)
    start_without_torch(model, cache)


def start_without_torch(model: str, cache: Path) -> None:
    """As a stack starts once all is prepared: importing torch would cost it two seconds."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from cli.prepare import prepare; from cli.progress import Progress\n"
        "prepare(sys.argv[1], Progress(sys.stdout), verifies=False)"
    )
    environment = {**os.environ, "TWOSTROKE_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", script, model], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "quantizing" not in run.stdout
