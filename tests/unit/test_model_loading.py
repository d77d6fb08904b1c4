"""Hugging Face folders: from files to tensors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.weights import load_weights
from common.tokenizer_files import tokenizer_digest
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, FAMILIES, make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", "llama")


def prepare(folder: Path, cache: Path) -> PreparedModel:
    return prepare_model(str(folder), cache, lambda _line: None)


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_transformers_own(family: str, tied: bool, tmp_path: Path, cache: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", family, tie_word_embeddings=tied)
    prepared = prepare(folder, cache)
    expected = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).state_dict()
    if tied:
        del expected["lm_head.weight"]
    found = load_weights(prepared, CPU)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert prepared.config.tie_word_embeddings is tied
    assert prepared.weight_files == (folder / "model.safetensors",)  # they stay where they are


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_widened(dtype: str, tmp_path: Path, cache: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama", dtype=dtype)
    stored = load_file(folder / "model.safetensors")
    found = load_weights(prepare(folder, cache), CPU)
    assert all(weight.dtype is torch.float32 for weight in found.values())
    assert all(torch.equal(found[name], stored[name].float()) for name in found)


def test_shards_are_joined(tiny: Path, tmp_path: Path, cache: Path) -> None:
    sharded = make_tiny_model(tmp_path / "sharded", "llama", max_shard_size="60KB")
    prepared = prepare(sharded, cache)
    assert len(prepared.weight_files) > 2
    expected, found = load_weights(prepare(tiny, cache), CPU), load_weights(prepared, CPU)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_older_checkpoints_carry_beside_the_weights_is_passed_over(tiny: Path, cache: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # tied, and written all the same
    save_file(weights, tiny / "model.safetensors")
    found = load_weights(prepare(tiny, cache), CPU)
    assert "lm_head.weight" not in found
    assert len(found) == len(weights) - 2


def test_the_gateway_s_files(tiny: Path, cache: Path) -> None:
    prepared = prepare(tiny, cache)
    assert set(prepared.tokenizer_files) == {"tokenizer.json", "tokenizer_meta.json"}
    assert prepared.tokenizer_digest == tokenizer_digest(prepared.tokenizer_files)
    assert prepared.tokenizer_files["tokenizer.json"] == (tiny / "tokenizer.json").read_bytes()
    assert json.loads(prepared.tokenizer_files["tokenizer_meta.json"]) == {
        "chat_template": CHAT_TEMPLATE,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "eos_token_ids": [1],
        "bos_token_id": 0,
        "special_token_ids": [0, 1, 2],
        "vocab_size": 512,
        "max_model_len": 1024,
        "model_name": "tiny",
    }


def test_a_tokenizer_that_cuts_and_pads_is_made_to_do_neither(tiny: Path, cache: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tiny / "tokenizer.json"))
    served = Tokenizer.from_buffer(prepare(tiny, cache).tokenizer_files["tokenizer.json"])
    text = "When the gateway asks for room, decode answers with a ticket"
    assert served.decode(served.encode(text).ids) == text


def test_without_a_chat_template_there_is_none(tiny: Path, cache: Path) -> None:
    (tiny / "chat_template.jinja").unlink()
    assert json.loads(prepare(tiny, cache).tokenizer_files["tokenizer_meta.json"])["chat_template"] is None


def test_a_vocabulary_with_merges_is_converted(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "qwen2")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (folder / "merges.txt").write_text("".join(f"{' '.join(merge)}\n" for merge in tokenizer["model"]["merges"]))
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    served = Tokenizer.from_buffer(prepare(folder, cache).tokenizer_files["tokenizer.json"])
    text = "The engine takes a prompt<|im_end|>"
    assert served.decode(served.encode(text).ids, skip_special_tokens=False) == text
    assert served.token_to_id(EOS_TOKEN) in served.encode(text).ids


def test_stop_tokens_come_from_all_who_name_them(tiny: Path, cache: Path) -> None:
    edit_json(tiny / "config.json", eos_token_id=5)
    edit_json(tiny / "generation_config.json", eos_token_id=[7, 6])
    assert prepare(tiny, cache).config.eos_token_ids == (1, 5, 6, 7)


def test_a_class_s_default_stop_token_is_not_the_model_s(tiny: Path, cache: Path) -> None:
    raw = json.loads((tiny / "config.json").read_text())
    del raw["eos_token_id"]  # LlamaConfig would say 2
    (tiny / "config.json").write_text(json.dumps(raw))
    (tiny / "generation_config.json").unlink()
    assert prepare(tiny, cache).config.eos_token_ids == (1,)


def test_every_file_that_counts_changes_a_digest(tiny: Path, cache: Path) -> None:
    before = prepare(tiny, cache)
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, tiny / "model.safetensors")
    after = prepare(tiny, cache)
    assert after.weights_digest != before.weights_digest
    assert after.tokenizer_digest == before.tokenizer_digest
    (tiny / "chat_template.jinja").write_text("{{ messages }}")
    assert prepare(tiny, cache).tokenizer_digest != after.tokenizer_digest


def test_the_same_files_elsewhere_have_the_same_digests(tiny: Path, tmp_path: Path, cache: Path) -> None:
    other = make_tiny_model(tmp_path / "elsewhere" / "tiny", "llama")
    first, second = prepare(tiny, cache), prepare(other, tmp_path / "another cache")
    assert (first.weights_digest, first.tokenizer_digest) == (second.weights_digest, second.tokenizer_digest)


def run_python(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, timeout=100
    ).stdout


def test_the_second_start_needs_neither_transformers_nor_torch(tiny: Path, cache: Path) -> None:
    prepare(tiny, cache)
    code = (
        "import sys; from pathlib import Path; from common.model.loading import prepare_model\n"
        "prepare_model(sys.argv[1], Path(sys.argv[2]), print)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code, str(tiny), str(cache)) == "[]\n"


def test_preparing_is_quiet_and_writes_to_the_cache_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "hf", "llama")
    file = write_tiny_gguf(tmp_path / "tiny.gguf", folder)
    before = sorted(tmp_path.rglob("*"))
    code = (
        "import sys; from pathlib import Path; from common.model.loading import prepare_model\n"
        "for source in sys.argv[2:]: prepare_model(source, Path(sys.argv[1]), print)"
    )
    home = tmp_path / "home"
    home.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache"), str(file), str(folder)],
        check=True, capture_output=True, text=True, timeout=100, env={"HOME": str(home), "PYTHONPATH": "."},
    )  # fmt: skip
    assert result.stderr == ""
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["converting", "converted", "reading"]
    after = {path for path in tmp_path.rglob("*") if path.relative_to(tmp_path).parts[0] != "cache"}
    assert sorted(after - {home}) == before


PREPARE_PROGRAM = """
import sys
from pathlib import Path
from common.model.loading import prepare_model

prepared = prepare_model(sys.argv[1], Path(sys.argv[2]), lambda line: print(line, flush=True))
print(prepared.weights_digest.hex())
"""


def test_two_processes_that_start_at_once_convert_once(tiny: Path, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", tiny)
    first, second = tmp_path / "first", tmp_path / "second"
    prepared = prepare_model(str(file), first, lambda _line: None)
    models = second / "models"
    models.mkdir(parents=True)
    # Both are held at the lock until both have come to it, so that they meet there however slowly they start.
    with FileLock(models / f"{prepared.folder.name}.lock"):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PREPARE_PROGRAM, str(file), str(second)], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("waiting for another process")
    outputs = [process.communicate(timeout=100)[0].splitlines() for process in processes]
    assert sorted(len(lines) for lines in outputs) == [1, 3]  # one converts, says so twice, and both give the digest
    assert {lines[-1] for lines in outputs} == {prepared.weights_digest.hex()}
