"""One HTML page of a result: tables, and plots as inline SVG. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.replay.html_parts import document, pairs, shown, table

_WIDTH, _HEIGHT, _MARGIN = 560, 240, 44
_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#7a3b8f")
_ROWS = (
    ("queue_ms", "Queue at the client, ms"),
    ("ttft_ms", "TTFT, ms"),
    ("tpot_ms", "TPOT, ms"),
    ("inter_token_ms", "Inter-token, ms"),
    ("exposed_transfer_ms", "Exposed transfer, ms"),
)
Curves = Mapping[str, Mapping[str, Sequence[float]]]
"""Figure to bucket to milliseconds."""


def make_page(result: Mapping[str, Any], curves: Curves) -> str:
    report = result["report"]
    slices = {"overall": report["overall"], **report["buckets"]}
    parts = [
        pairs("Run", {"model": result["model"], "state": result["state"], **result["promise"], **result["trace"]}),
        *(_slice_table(name, figures) for name, figures in slices.items()),
        *(_plot(title, curves[name]) for name, title in _ROWS if any(curves.get(name, {}).values())),
        *(pairs(name.capitalize(), result[name]) for name in ("server", "configuration", "hardware", "versions")),
    ]
    return document("Traffic replay", parts)


def _slice_table(name: str, figures: Mapping[str, Any]) -> str:
    columns = ("count", "mean", "p50", "p95", "p99", "max")
    rows = [[title, *(figures[key][column] for column in columns)] for key, title in _ROWS if figures[key] is not None]
    plain = {key: value for key, value in figures.items() if key not in dict(_ROWS)}
    title = name if name == "overall" else f"prompts of {name} tokens"
    return pairs(title, plain) + table(["", *columns], rows)


def _plot(title: str, curves: Mapping[str, Sequence[float]]) -> str:
    """The share of values up to each value, a line per bucket."""
    top = max(max(values) for values in curves.values() if values) or 1.0
    lines = [
        _curve(sorted(values), top, colour) + _legend(name, index, colour)
        for index, ((name, values), colour) in enumerate(zip(curves.items(), _COLOURS, strict=False))
        if values
    ]
    axes = (
        f'<path d="M{_MARGIN} {_MARGIN}V{_HEIGHT - _MARGIN}H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>'
        f'<text x="{_MARGIN}" y="20">{escape(title)}: share of values up to</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 18}" text-anchor="end">{shown(top)}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 18}">0</text><text x="8" y="{_MARGIN + 4}">100%</text>'
    )
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg {size} role="img" font-size="12">{axes}{"".join(lines)}</svg>'


def _curve(ordered: Sequence[float], top: float, colour: str) -> str:
    points = [(0.0, 0.0), *((value, (index + 1) / len(ordered)) for index, value in enumerate(ordered))]
    places = " ".join(f"{_across(value / top):.1f},{_up(share):.1f}" for value, share in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _legend(name: str, index: int, colour: str) -> str:
    y = _HEIGHT - _MARGIN - 8 - 16 * index
    return f'<text x="{_WIDTH - _MARGIN}" y="{y}" text-anchor="end" fill="{colour}">{escape(name)}</text>'


def _across(share: float) -> float:
    return _MARGIN + share * (_WIDTH - 2 * _MARGIN)


def _up(share: float) -> float:
    return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)
