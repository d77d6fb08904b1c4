"""`twostroke prepare` makes ahead what a worker would make at its first start."""

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
