"""A card as one HTML page. Pure."""

from collections.abc import Mapping
from typing import Any

from bench.replay.html_parts import document, pairs, shown, table


def make_card_page(card: Mapping[str, Any]) -> str:
    changed = [[name, shown(before), shown(after)] for name, (before, after) in card["changed"].items()]
    gates = [[name, gate["verdict"], gate["detail"]] for name, gate in card["gates"].items()]
    decision = {"decision": card["decision"], "reason": card["reason"], "noise": card["noise"]}
    parts = [
        pairs("Decision", {**decision, "runs": card["num_runs"], "answers": card["answers"]}),
        "<h2>What changed</h2>",
        table(["", "before", "after"], changed),
        "<h2>Gates</h2>",
        table(["", "verdict", "why"], gates),
        *(_slice_part(name, figures) for name, figures in card["slices"].items()),
        pairs("Rules", card["rules"]),
    ]
    return document("Comparison card", parts)


def _slice_part(name: str, figures: Mapping[str, Any]) -> str:
    columns = ("before", "after", "ratio", "noise_share", "change")
    rows = [[figure, *(held[column] for column in columns)] for figure, held in figures.items()]
    title = name if name == "overall" else f"Prompts of {name} tokens"
    return f"<h2>{title.capitalize()}</h2>" + table(["", "before", "after", "ratio", "noise", "change"], rows)
