"""Pieces of self-contained HTML pages: they load nothing, and escape whatever they show. Pure."""

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{background:#fafafa;margin:.5rem}"
    ".better{color:#1f6b33}.worse{color:#a32015}"
)


def document(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def pairs(title: str, values: Mapping[str, object] | None) -> str:
    """A heading and a table of names and values; nothing for None."""
    if values is None:
        return ""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(shown(value))}</td></tr>" for name, value in values.items())
    return f"<h2>{escape(title)}</h2><table>{rows}</table>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Of the head's length every row; a cell's value as `shown`."""
    return f"<table>{_row('th', head)}{''.join(_row('td', row) for row in rows)}</table>"


def shown(value: object) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {held}" for name, held in value.items()) or "none"
    return str(value)


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(_cell(tag, shown(cell)) for cell in cells)}</tr>"


def _cell(tag: str, text: str) -> str:
    kind = f' class="{text}"' if text in ("better", "worse") else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
