"""What int8 numerics cost: perplexity, divergence and top-1 agreement against fp32 weights and activations.

The baseline keeps FP32 KV; int8 numerics are measured with FP32 and with INT8 KV. `python -m bench.numerics_quality`.
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
from common.kv.layout import KVFormat
from common.model.assembly import LoadedModel, load_model
from common.model.batch import ScheduledTokens
from common.model.linear import Numerics

MIN_TOKENS = 6000
MAX_PERPLEXITY_RISE_PERCENT = 0.5
MAX_DIVERGENCE_NATS = 0.01
MIN_TOP1_AGREEMENT_PERCENT = 95.5
_CHUNK = 256
_BASELINE = (Numerics.REFERENCE, KVFormat.FP32)
_MEASURED = ((Numerics.INT8, KVFormat.FP32), (Numerics.INT8, KVFormat.INT8))


@dataclass(slots=True)
class Score:
    """Sums over predicted tokens; adds up over chunks and texts."""

    num_tokens: int = 0
    baseline_nll: float = 0.0  # nats
    nll: float = 0.0
    divergence: float = 0.0  # KL(baseline || measured), nats
    num_agreed: int = 0  # the same most likely token

    def add(self, other: "Score") -> None:
        self.num_tokens += other.num_tokens
        self.baseline_nll += other.baseline_nll
        self.nll += other.nll
        self.divergence += other.divergence
        self.num_agreed += other.num_agreed

    def summary(self) -> dict[str, float]:
        baseline, measured = math.exp(self.baseline_nll / self.num_tokens), math.exp(self.nll / self.num_tokens)
        return {
            "num_tokens": self.num_tokens,
            "perplexity_baseline": baseline,
            "perplexity": measured,
            "perplexity_rise_percent": 100 * (measured / baseline - 1),
            "divergence_nats": self.divergence / self.num_tokens,
            "top1_agreement_percent": 100 * self.num_agreed / self.num_tokens,
        }


Summaries = dict[str, dict[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the targets are met, 1 when not, 2 when it could not be measured."""
    arguments = _parse(argv)
    try:
        models = {key: _load(arguments.model, *key) for key in (_BASELINE, *_MEASURED)}
    except TwostrokeError as error:
        print(f"numerics_quality: {error}", file=sys.stderr)
        return 2
    report = measure(models, arguments.tokens_per_text)
    for name, summaries in report.items():
        _print_table(name, summaries)
    print(json.dumps({"model": models[_BASELINE].prepared.name, "measured": report}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return max(_verdict(name, summaries["all"]) for name, summaries in report.items())


def measure(models: dict[tuple[Numerics, KVFormat], LoadedModel], tokens_per_text: int) -> dict[str, Summaries]:
    """what was measured -> style -> figures, and "all". Each text starts with an empty cache."""
    prepared = models[_BASELINE].prepared
    tokenizer = Tokenizer.from_str(prepared.tokenizer_files["tokenizer.json"].decode())
    report: dict[str, Summaries] = {_name(*key): {} for key in _MEASURED}
    totals = {_name(*key): Score() for key in _MEASURED}
    for style, text in bundled_texts().items():
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:tokens_per_text]
        scores = {_name(*key): Score() for key in _MEASURED}
        for name, chunk_score in _chunk_scores(models, token_ids):
            scores[name].add(chunk_score)
            totals[name].add(chunk_score)
        for name, score in scores.items():
            report[name][style] = score.summary()
    return {name: summaries | {"all": totals[name].summary()} for name, summaries in report.items()}


def _name(numerics: Numerics, kv_format: KVFormat) -> str:
    return f"{numerics} numerics, {kv_format} KV"


def _load(source: str, numerics: Numerics, kv_format: KVFormat) -> LoadedModel:
    return load_model(
        source=source,
        cache_dir=cache_dir(),
        device="cpu",
        backend="cpu",
        numerics=numerics,
        kv_format=kv_format,
        block_size=16,
        kv_memory_bytes=256 << 20,
        max_model_len=None,
        progress=lambda line: print(line, file=sys.stderr),
    )


def _chunk_scores(
    models: dict[tuple[Numerics, KVFormat], LoadedModel], token_ids: Sequence[int]
) -> Iterator[tuple[str, Score]]:
    """Each position predicts the next; the last one predicts nothing."""
    for start in range(0, len(token_ids) - 1, _CHUNK):
        chunk = token_ids[start : min(start + _CHUNK, len(token_ids) - 1)]
        following = torch.tensor(token_ids[start + 1 : start + 1 + len(chunk)])
        logprobs = {key: _logprobs(model, chunk, start) for key, model in models.items()}
        for key in _MEASURED:
            yield _name(*key), _compare(logprobs[_BASELINE], logprobs[key], following)


def _logprobs(model: LoadedModel, chunk: Sequence[int], start: int) -> torch.Tensor:
    scheduled = ScheduledTokens(chunk, start, range(model.num_blocks), num_logits=len(chunk))
    return model.runner.run([scheduled]).logits.double().log_softmax(dim=1)


def _compare(baseline: torch.Tensor, measured: torch.Tensor, following: torch.Tensor) -> Score:
    rows = torch.arange(following.shape[0])
    return Score(
        num_tokens=following.shape[0],
        baseline_nll=-float(baseline[rows, following].sum()),
        nll=-float(measured[rows, following].sum()),
        divergence=float((baseline.exp() * (baseline - measured)).sum()),
        num_agreed=int((baseline.argmax(dim=1) == measured.argmax(dim=1)).sum()),
    )


def _verdict(name: str, total: dict[str, float]) -> int:
    if total["num_tokens"] < MIN_TOKENS:
        print(f"only {total['num_tokens']} tokens; at least {MIN_TOKENS} are needed for a verdict", file=sys.stderr)
        return 2
    is_met = (
        total["perplexity_rise_percent"] <= MAX_PERPLEXITY_RISE_PERCENT
        and total["divergence_nats"] <= MAX_DIVERGENCE_NATS
        and total["top1_agreement_percent"] >= MIN_TOP1_AGREEMENT_PERCENT
    )
    print(
        f"{name}: target (perplexity within +{MAX_PERPLEXITY_RISE_PERCENT} %, KL at most {MAX_DIVERGENCE_NATS}, top-1 "
        f"agreement at least {MIN_TOP1_AGREEMENT_PERCENT} %) {'met' if is_met else 'missed'}"
    )
    return 0 if is_met else 1


def _print_table(name: str, summaries: Summaries) -> None:
    print(f"{name}\n{'text':10}{'tokens':>8}{'ppl fp32':>11}{'ppl':>11}{'rise %':>9}{'KL nats':>10}{'top-1 %':>9}")
    for style, row in summaries.items():
        print(
            f"{style:10}{row['num_tokens']:8.0f}{row['perplexity_baseline']:11.4f}{row['perplexity']:11.4f}"
            f"{row['perplexity_rise_percent']:+9.3f}{row['divergence_nats']:10.6f}{row['top1_agreement_percent']:9.2f}"
        )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.numerics_quality", description=__doc__)
    parser.add_argument("--model", default="default", help="a .gguf file, a Hugging Face folder, or `default`")
    parser.add_argument("--tokens-per-text", type=int, default=3072, help="at most, of each text; one context")
    parser.add_argument("--json", type=Path, help="writes the figures there too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
