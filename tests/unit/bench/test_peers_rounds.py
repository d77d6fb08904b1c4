"""The order of turns, and what a failing engine does to the others."""

from dataclasses import dataclass, field

from bench.peers.drivers import EngineFailed, WorkFailed
from bench.peers.rounds import run_rounds
from bench.peers.work import WARM_UP, WORKS, Figures, Work


@dataclass
class FakeEngine:
    name: str
    events: list[str]
    fails_at: str | None = None
    failure: Exception = field(default_factory=lambda: EngineFailed("no more"))
    seeds: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.events.append(f"{self.name} start")

    def run(self, work: Work, seed: int) -> Figures:
        if work.name == self.fails_at:
            raise self.failure
        self.seeds.append(seed)
        return Figures(1.0, 1.0, 1.0)

    def stop(self) -> None:
        self.events.append(f"{self.name} stop")


def silent(text: str) -> None:
    pass


def test_engines_alternate_and_one_has_the_machine_at_a_time() -> None:
    events: list[str] = []
    engines = {name: FakeEngine(name, events) for name in "AB"}
    run_rounds(engines, WORKS[:1], 2, silent)
    assert events == ["A start", "A stop", "B start", "B stop"] * 2


def test_prompts_are_the_same_for_all_and_new_in_each_round() -> None:
    engines = {name: FakeEngine(name, []) for name in "AB"}
    run_rounds(engines, WORKS, 2, silent)
    assert engines["A"].seeds == engines["B"].seeds
    assert len(set(engines["A"].seeds)) == 2 * (len(WORKS) + 1)


def test_a_failure_is_named_and_ends_that_turn_alone() -> None:
    engines = {"A": FakeEngine("A", [], fails_at=WORKS[1].name), "B": FakeEngine("B", [])}
    rounds, failures = run_rounds(engines, WORKS[:3], 1, silent)
    assert list(rounds["A"][0]) == [WORKS[0].name]
    assert list(rounds["B"][0]) == [work.name for work in WORKS[:3]]
    assert [(each.engine, each.round, each.work) for each in failures] == [("A", 1, WORKS[1].name)]
    assert engines["A"].events[-1] == "A stop"


def test_a_work_that_does_not_count_ends_nothing() -> None:
    engine = FakeEngine("A", [], fails_at=WORKS[1].name, failure=WorkFailed("only 3 of 4"))
    rounds, failures = run_rounds({"A": engine}, WORKS[:3], 1, silent)
    assert list(rounds["A"][0]) == [WORKS[0].name, WORKS[2].name]
    assert [(each.work, each.reason) for each in failures] == [(WORKS[1].name, "only 3 of 4")]


def test_warm_up_is_not_a_figure() -> None:
    rounds, _ = run_rounds({"A": FakeEngine("A", [])}, WORKS[:1], 1, silent)
    assert WARM_UP.name not in rounds["A"][0]
