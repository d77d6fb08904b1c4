"""The default model as it comes out of its GGUF file."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from common.config import cache_dir
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.source import resolve_source
from common.model.weights import load_weights
from tests.support.real_model import prepared_smollm2

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_model_config.json"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepared_smollm2()


def test_its_configuration_is_the_golden_one(prepared: PreparedModel) -> None:
    found = json.loads(json.dumps(asdict(prepared.config)))
    expected = json.loads(GOLDEN.read_text())
    # powers may round differently by an ulp or two on another processor
    assert found.pop("rope_inv_freq") == pytest.approx(expected.pop("rope_inv_freq"), rel=2**-22)
    assert found == expected


def test_the_end_of_a_turn_is_a_stop_token(prepared: PreparedModel) -> None:
    tokenizer = Tokenizer.from_buffer(prepared.tokenizer_files["tokenizer.json"])
    assert tokenizer.token_to_id("<|im_end|>") in prepared.config.eos_token_ids


def test_the_meta_file(prepared: PreparedModel) -> None:
    meta = json.loads(prepared.tokenizer_files["tokenizer_meta.json"])
    assert "trained by Hugging Face" in meta.pop("chat_template")
    assert meta == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "eos_token_ids": [2],
        "bos_token_id": 1,
        "special_token_ids": list(range(17)),
        "vocab_size": 49_152,
        "max_model_len": 8_192,
        "model_name": "SmolLM2-135M-Instruct",
    }


def test_every_weight_is_there_in_fp32(prepared: PreparedModel) -> None:
    weights = load_weights(prepared, CPU)
    assert len(weights) == 30 * 9 + 2
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert weights["model.embed_tokens.weight"].shape == (49_152, 576)
    assert "lm_head.weight" not in weights


def test_any_text_survives_the_tokenizer(prepared: PreparedModel) -> None:
    tokenizer = Tokenizer.from_buffer(prepared.tokenizer_files["tokenizer.json"])
    text = "Größe 漢字 🚒  12345\n\n\tdef f(x): return x1 + 10"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a  10").tokens == ["a", "ĠĠ", "1", "0"]  # spaces are not torn apart before a digit


@pytest.mark.slow
@pytest.mark.timeout(600)  # their reader parses the whole vocabulary in Python, several times
def test_its_weights_and_tokens_are_those_of_transformers_own_reader(prepared: PreparedModel) -> None:
    gguf = resolve_source("default").path
    location = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    theirs = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32).state_dict()
    del theirs["lm_head.weight"]  # tied
    ours = load_weights(prepared, CPU)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    text = "The capital of France is Paris.\n\ndef f(x):\n    return [x, 10]\n<|im_start|>user\nGrüße<|im_end|>"
    tokenizer = Tokenizer.from_buffer(prepared.tokenizer_files["tokenizer.json"])
    assert tokenizer.encode(text).ids == PreTrainedTokenizerFast.from_pretrained(**location)(text)["input_ids"]


def test_opening_it_again_converts_nothing(prepared: PreparedModel) -> None:
    lines: list[str] = []
    again = prepare_model("default", cache_dir(), lines.append)
    assert again == prepared
    assert lines == []
