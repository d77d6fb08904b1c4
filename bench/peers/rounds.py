"""The rounds: in each, every engine in turn is started, warmed up, given every work, and stopped."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.peers.drivers import EngineFailed, WorkFailed
from bench.peers.servers import Engine
from bench.peers.work import WARM_UP, Figures, Work

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    engine: str
    round: int
    work: str
    reason: str


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_rounds(
    engines: Mapping[str, Engine], works: Sequence[Work], num_rounds: int, say: Say = say
) -> tuple[dict[str, list[dict[str, Figures]]], list[Failure]]:
    """Figures by engine, round and work; what failed is absent from them and named beside them.

    Engines alternate within a round (A B C, A B C), so that what slows the machine for minutes slows all of them.
    """
    rounds: dict[str, list[dict[str, Figures]]] = {name: [] for name in engines}
    failures: list[Failure] = []
    for number in range(num_rounds):
        for name, engine in engines.items():
            rounds[name].append(_one_turn(name, engine, works, number, failures, say))
    return rounds, failures


def _one_turn(
    name: str, engine: Engine, works: Sequence[Work], number: int, failures: list[Failure], say: Say
) -> dict[str, Figures]:
    done: dict[str, Figures] = {}
    started, doing = time.monotonic(), "start"
    try:
        engine.start()
        for index, work in enumerate((WARM_UP, *works)):
            doing = work.name
            try:
                done[work.name] = engine.run(work, seed=1000 * number + index)
            except WorkFailed as why:
                failures.append(Failure(name, number + 1, doing, str(why)))
                say(f"round {number + 1}, {name}, {doing}: not counted: {why}")
            else:
                say(f"round {number + 1}, {name}, {doing}: {_short(done[doing])}")
    except EngineFailed as why:
        failures.append(Failure(name, number + 1, doing, str(why)))
        say(f"round {number + 1}, {name}, {doing}: failed: {why}")
    finally:
        engine.stop()
    say(f"round {number + 1}, {name}: {time.monotonic() - started:.0f} s")
    return {work: figures for work, figures in done.items() if work != WARM_UP.name}


def _short(figures: Figures) -> str:
    return (
        f"TTFT {figures.ttft_ms:.0f} ms, TPOT {figures.tpot_ms:.1f} ms, {figures.output_tokens_per_s:.0f} output tok/s"
    )
