"""Which runs may stand on one card, and what is different about those that may. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.replay.card.figures import Run

_TRAFFIC = {
    "trace.digest": "traffic shapes",
    "configuration.prompts": "kinds of prompts",
    "configuration.ignore_eos": "ways to end an answer",
    "configuration.timeout_s": "time-outs",
    "state": "states of the server",
}
_HARDWARE = "hardware"
_TOLD = ("model", "promise", "state", "configuration", _HARDWARE, "versions")
_SERVER = ("num_prefill_workers", "num_decode_workers", "backends")
_FREE_WITHIN_A_SIDE = frozenset({"configuration.notes"})

Named = tuple[str, Run]
"""A run with the name of its file."""


def refusals(before: Sequence[Named], after: Sequence[Named], *, allows_other_hardware: bool) -> list[str]:
    """Why these runs make no card, both values named; empty: they do."""
    found = [*_other_traffic([*before, *after])]
    if not allows_other_hardware:
        found += _others([*before, *after], is_hardware, "hardware")
    for side in (before, after):
        found += _others(side, lambda name: not _is_free(name), "runs of one side")
    return [*dict.fromkeys(found)]


def changes(before: Run, after: Run) -> dict[str, list[object]]:
    """What is told of the runs and is not equal: name to [before, after]; None where a side lacks it."""
    start, end = told(before), told(after)
    return {
        name: [start.get(name), end.get(name)]
        for name in dict.fromkeys([*start, *end])
        if start.get(name) != end.get(name)
    }


def told(run: Run) -> dict[str, object]:
    """Dotted name to value."""
    server: Mapping[str, object] = run["server"] or {}
    content = {name: run[name] for name in _TOLD} | {"server": {name: server.get(name) for name in _SERVER}}
    return {"trace.digest": run["trace"]["digest"], **dict(_flat("", content))}


def is_hardware(name: str) -> bool:
    return name.startswith(f"{_HARDWARE}.")


def _is_free(name: str) -> bool:
    return name in _FREE_WITHIN_A_SIDE or name in _TRAFFIC or is_hardware(name)


def _other_traffic(runs: Sequence[Named]) -> Iterator[str]:
    (first, reference), *others = runs
    for name, run in others:
        for key, words in _TRAFFIC.items():
            start, end = told(reference)[key], told(run)[key]
            if start != end:
                yield f"different {words}: {key} is {_short(start)} in {first} and {_short(end)} in {name}"


def _others(runs: Sequence[Named], concerns: Any, words: str) -> list[str]:
    (first, reference), *others = runs
    found = []
    for name, run in others:
        for key, (start, end) in changes(reference, run).items():
            if concerns(key):
                found.append(f"different {words}: {key} is {_short(start)} in {first} and {_short(end)} in {name}")
    return found


def _flat(prefix: str, content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _short(value: object) -> str:
    return str(value)[:80]
