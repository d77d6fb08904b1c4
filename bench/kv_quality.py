"""What INT8 KV costs: perplexity, divergence and top-1 agreement against FP32 KV, on text that is on every machine.

Both runs share weights, kernels and chunks; only the KV cache's format differs. `python -m bench.kv_quality`.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.texts import bundled_texts
from common.config import cache_dir
from common.errors import TwostrokeError
from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.model.assembly import LoadedModel, load_model
from common.model.batch import ScheduledTokens
from common.model.runner import ModelRunner

MIN_TOKENS = 6000
MAX_PERPLEXITY_RISE_PERCENT = 0.3
MIN_TOP1_AGREEMENT_PERCENT = 97.0
_CHUNK = 256
_POOL_BYTES = 512 << 20
_FORMATS = (KVFormat.FP32, KVFormat.INT8)


@dataclass(slots=True)
class Score:
    """Sums over predicted tokens; adds up over chunks and texts."""

    num_tokens: int = 0
    nll_fp32: float = 0.0  # nats
    nll_int8: float = 0.0
    divergence: float = 0.0  # KL(FP32 || INT8), nats
    num_agreed: int = 0  # the same most likely token

    def add(self, other: "Score") -> None:
        self.num_tokens += other.num_tokens
        self.nll_fp32 += other.nll_fp32
        self.nll_int8 += other.nll_int8
        self.divergence += other.divergence
        self.num_agreed += other.num_agreed

    def summary(self) -> dict[str, float]:
        fp32, int8 = math.exp(self.nll_fp32 / self.num_tokens), math.exp(self.nll_int8 / self.num_tokens)
        return {
            "num_tokens": self.num_tokens,
            "perplexity_fp32": fp32,
            "perplexity_int8": int8,
            "perplexity_rise_percent": 100 * (int8 / fp32 - 1),
            "divergence_nats": self.divergence / self.num_tokens,
            "top1_agreement_percent": 100 * self.num_agreed / self.num_tokens,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the targets are met, 1 when not, 2 when it could not be measured."""
    arguments = _parse(argv)
    try:
        model = load_model(
            source=arguments.model,
            cache_dir=cache_dir(),
            device=arguments.device,
            backend=arguments.backend,
            numerics=arguments.numerics,
            kv_format=KVFormat.INT8,
            block_size=16,
            kv_memory_bytes=_POOL_BYTES,
            max_model_len=None,
            progress=lambda line: print(line, file=sys.stderr),
        )
    except TwostrokeError as error:
        print(f"kv_quality: {error}", file=sys.stderr)
        return 2
    if arguments.tokens_per_text > model.max_model_len:
        print(
            f"kv_quality: {arguments.tokens_per_text} tokens per text; at most {model.max_model_len}", file=sys.stderr
        )
        return 2
    summaries = measure(model, arguments.tokens_per_text)
    _print_table(summaries)
    report = {"model": model.prepared.name, "backend": model.ops.description, "texts": summaries}
    print(json.dumps(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return _verdict(summaries["all"])


def measure(model: LoadedModel, tokens_per_text: int) -> dict[str, dict[str, float]]:
    """style -> figures, and "all". Each text starts with an empty cache."""
    tokenizer = Tokenizer.from_str(model.prepared.tokenizer_files["tokenizer.json"].decode())
    runners = {kv_format: _runner(model, kv_format, tokens_per_text) for kv_format in _FORMATS}
    total, summaries = Score(), {}
    for style, text in bundled_texts().items():
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:tokens_per_text]
        score = Score()
        for chunk_score in _chunk_scores(runners, token_ids):
            score.add(chunk_score)
        total.add(score)
        print(f"{style}: {len(token_ids)} tokens", file=sys.stderr)
        summaries[style] = score.summary()
    return summaries | {"all": total.summary()}


def _runner(model: LoadedModel, kv_format: KVFormat, num_tokens: int) -> ModelRunner:
    config = model.config
    layout = KVLayout(kv_format, model.layout.block_size, config.num_layers, config.num_kv_heads, config.head_dim)
    transformer = model.runner.transformer
    return ModelRunner(transformer, KVCache(layout, layout.num_blocks(num_tokens), transformer.device))


def _chunk_scores(runners: dict[KVFormat, ModelRunner], token_ids: Sequence[int]) -> Iterator[Score]:
    """Each position predicts the next; the last one predicts nothing."""
    for start in range(0, len(token_ids) - 1, _CHUNK):
        chunk = token_ids[start : min(start + _CHUNK, len(token_ids) - 1)]
        following = torch.tensor(token_ids[start + 1 : start + 1 + len(chunk)])
        logprobs = {kv_format: _logprobs(runner, chunk, start) for kv_format, runner in runners.items()}
        yield _compare(logprobs[KVFormat.FP32], logprobs[KVFormat.INT8], following)


def _logprobs(runner: ModelRunner, chunk: Sequence[int], start: int) -> torch.Tensor:
    scheduled = ScheduledTokens(chunk, start, range(runner.cache.num_blocks), num_logits=len(chunk))
    return runner.run([scheduled]).logits.log_softmax(dim=1).cpu()


def _compare(fp32: torch.Tensor, int8: torch.Tensor, following: torch.Tensor) -> Score:
    rows = torch.arange(following.shape[0])
    return Score(
        num_tokens=following.shape[0],
        nll_fp32=-float(fp32[rows, following].double().sum()),
        nll_int8=-float(int8[rows, following].double().sum()),
        divergence=float((fp32.exp() * (fp32 - int8)).sum(dtype=torch.float64)),
        num_agreed=int((fp32.argmax(dim=1) == int8.argmax(dim=1)).sum()),
    )


def _verdict(total: dict[str, float]) -> int:
    if total["num_tokens"] < MIN_TOKENS:
        print(f"only {total['num_tokens']} tokens; at least {MIN_TOKENS} are needed for a verdict", file=sys.stderr)
        return 2
    is_met = (
        total["perplexity_rise_percent"] <= MAX_PERPLEXITY_RISE_PERCENT
        and total["top1_agreement_percent"] >= MIN_TOP1_AGREEMENT_PERCENT
    )
    print(
        f"target (perplexity within +{MAX_PERPLEXITY_RISE_PERCENT} %, top-1 agreement at least "
        f"{MIN_TOP1_AGREEMENT_PERCENT} %): {'met' if is_met else 'missed'}"
    )
    return 0 if is_met else 1


def _print_table(summaries: dict[str, dict[str, float]]) -> None:
    print(f"{'text':10}{'tokens':>8}{'ppl FP32':>11}{'ppl INT8':>11}{'rise %':>9}{'KL nats':>10}{'top-1 %':>9}")
    for style, row in summaries.items():
        print(
            f"{style:10}{row['num_tokens']:8.0f}{row['perplexity_fp32']:11.4f}{row['perplexity_int8']:11.4f}"
            f"{row['perplexity_rise_percent']:+9.3f}{row['divergence_nats']:10.6f}{row['top1_agreement_percent']:9.2f}"
        )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.kv_quality", description=__doc__)
    parser.add_argument("--model", default="default", help="a .gguf file, a Hugging Face folder, or `default`")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--backend", default="auto", help="auto, cpu, triton or reference")
    parser.add_argument("--numerics", default="reference", help="numeric path of the linear layers")
    parser.add_argument("--tokens-per-text", type=int, default=2048, help="tokens of each text, one context")
    parser.add_argument("--json", type=Path, help="writes the figures there too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
