"""`python -m bench.replay.compare BEFORE.json AFTER.json`: two runs in, one decision out.

Exits 0 with a card, whatever it decides; 2 for a wrong setting or file; 3 for runs that cannot be compared.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.replay.card.comparable import Named, refusals
from bench.replay.card.figures import DECIDING, FIGURES, OVERALL
from bench.replay.card.gates import QualityLimits
from bench.replay.card.make import Json, Rules, make_card
from bench.replay.card.page import make_card_page
from bench.replay.run import FORMAT
from common.errors import ConfigError

EXIT_WRONG_SETTING = 2
EXIT_REFUSED = 3


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    try:
        before, after = ([_read(path) for path in paths] for paths in _sides(given))
        reasons = refusals(before, after, allows_other_hardware=given.allow_other_hardware)
        if reasons:
            print("no card:", *reasons, sep="\n- ", file=sys.stderr)
            return EXIT_REFUSED
        quality = _json(given.quality) if given.quality is not None else None
        card = make_card([run for _, run in before], [run for _, run in after], _rules(given), quality)
    except (ConfigError, OSError) as error:
        print(f"no card: {error}", file=sys.stderr)
        return EXIT_WRONG_SETTING
    if given.out is not None:
        given.out.write_text(json.dumps(card, indent=1) + "\n")
    if given.html is not None:
        given.html.write_text(make_card_page(card))
    print(summary(card, given.slice))
    return 0


def summary(card: Json, slice_name: str) -> str:
    """The decision, and one slice's figures."""
    lines = [f"{card['decision']}: {card['reason']}", f"noise: {card['noise']}"]
    lines += [f"{name}: {before} -> {after}" for name, (before, after) in card["changed"].items()]
    lines.append(f"{slice_name:26}{'before':>16}{'after':>16}{'ratio':>8}{'noise':>8}  change")
    for figure, held in card["slices"].get(slice_name, {}).items():
        ratio, noise = _cell(held["ratio"], ".3f"), _cell(held["noise_share"], ".1%")
        before, after = _size(held["before"]), _size(held["after"])
        lines.append(f"{figure:26}{before:>16}{after:>16}{ratio:>8}{noise:>8}  {held['change']}")
    return "\n".join(lines)


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e6 else f"{value:,.2f}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _sides(given: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    return [given.before, *given.also_before], [given.after, *given.also_after]


def _read(path: Path) -> Named:
    run = _json(path)
    if not isinstance(run, dict) or "requests" not in run or run.get("format") != FORMAT:
        raise ConfigError(f"{path.name} is no result of this bench.replay, which has format {FORMAT}; run it again")
    return path.name, run


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path.name} is no JSON: {error}") from None


def _rules(given: argparse.Namespace) -> Rules:
    for name in ("p99_tolerance_percent", "assumed_noise_percent"):
        if getattr(given, name) < 0:
            raise ConfigError(f"{name} is {getattr(given, name)}; it must be at least 0")
    return Rules(
        deciding=tuple(given.decide_by),
        deciding_slice=given.slice,
        p99_tolerance=given.p99_tolerance_percent / 100,
        assumed_noise=given.assumed_noise_percent / 100,
        answers_may_change=given.answers_may_change,
        quality_limits=QualityLimits(
            given.max_perplexity_rise_percent, given.max_divergence_nats, given.min_top1_agreement_percent
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.replay.compare", description="Compare two runs of bench.replay.")
    parser.add_argument("before", type=Path, help="a result of bench.replay")
    parser.add_argument("after", type=Path)
    parser.add_argument("--also-before", type=Path, nargs="+", default=[], help="more runs of the same, for the noise")
    parser.add_argument("--also-after", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path, help="the card as JSON")
    parser.add_argument("--html", type=Path, help="the card as a page, self-contained")
    parser.add_argument("--allow-other-hardware", action="store_true", help="compare runs of different machines")
    _add_rules(parser)
    return parser


def _add_rules(parser: argparse.ArgumentParser) -> None:
    rules, limits = Rules(), QualityLimits()
    group = parser.add_argument_group("rules")
    group.add_argument("--decide-by", nargs="+", choices=[*FIGURES], default=[*DECIDING], metavar="FIGURE")
    group.add_argument("--slice", default=OVERALL, help="whose figures decide: overall, or a bucket like 0-512")
    group.add_argument("--p99-tolerance-percent", type=float, default=rules.p99_tolerance * 100)
    noise_help = "where each side has one run alone"
    group.add_argument("--assumed-noise-percent", type=float, default=rules.assumed_noise * 100, help=noise_help)
    group.add_argument("--answers-may-change", action="store_true", help="the change is meant to change answers")
    group.add_argument("--quality", type=Path, help="JSON of bench.numerics_quality or bench.kv_quality, for AFTER")
    group.add_argument("--max-perplexity-rise-percent", type=float, default=limits.max_perplexity_rise_percent)
    group.add_argument("--max-divergence-nats", type=float, default=limits.max_divergence_nats)
    group.add_argument("--min-top1-agreement-percent", type=float, default=limits.min_top1_agreement_percent)


if __name__ == "__main__":
    sys.exit(main())
