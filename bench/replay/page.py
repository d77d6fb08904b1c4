"""One HTML page of a result: tables, and plots as inline SVG. It loads nothing. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 560, 240, 44
_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#7a3b8f")
_ROWS = (
    ("queue_ms", "Queue at the client, ms"),
    ("ttft_ms", "TTFT, ms"),
    ("tpot_ms", "TPOT, ms"),
    ("inter_token_ms", "Inter-token, ms"),
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{background:#fafafa;margin:.5rem}"
)
Curves = Mapping[str, Mapping[str, Sequence[float]]]
"""Figure to bucket to milliseconds."""


def make_page(result: Mapping[str, Any], curves: Curves) -> str:
    report = result["report"]
    slices = {"overall": report["overall"], **report["buckets"]}
    parts = [
        "<h1>Traffic replay</h1>",
        _pairs("Run", {"model": result["model"], "state": result["state"], **result["trace"]}),
        "".join(_slice_table(name, figures) for name, figures in slices.items()),
        *(_plot(title, curves[name]) for name, title in _ROWS if any(curves.get(name, {}).values())),
        *(_pairs(name.capitalize(), result[name]) for name in ("server", "configuration", "hardware", "versions")),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Traffic replay</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _pairs(title: str, values: Mapping[str, Any] | None) -> str:
    if values is None:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_shown(value))}</td></tr>" for name, value in values.items()
    )
    return f"<h2>{escape(title)}</h2><table>{rows}</table>"


def _slice_table(name: str, figures: Mapping[str, Any]) -> str:
    columns = ("count", "mean", "p50", "p95", "p99", "max")
    head = "".join(f"<th>{column}</th>" for column in ("", *columns))
    rows = [
        f"<tr><td>{title}</td>{''.join(f'<td>{_shown(figures[key][column])}</td>' for column in columns)}</tr>"
        for key, title in _ROWS
        if figures[key] is not None
    ]
    plain = {key: value for key, value in figures.items() if key not in dict(_ROWS)}
    title = name if name == "overall" else f"prompts of {name} tokens"
    return f"{_pairs(title, plain)}<table><tr>{head}</tr>{''.join(rows)}</table>"


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
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 18}" text-anchor="end">{_shown(top)}</text>'
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


def _shown(value: object) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {held}" for name, held in value.items()) or "none"
    return str(value)
