"""One request, one answer, at the level of the engine: whatever the batch, the budget, the pool, speculation."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import TwostrokeError
from common.ids import RequestId, TransferId
from common.kv.block_hash import root_hash
from common.kv.block_pool import BlockPool
from common.sampling import FinishReason, SamplingParams
from decode_svc.engine import DecodeEngine, SpeculationSettings, StepOutput
from decode_svc.scheduler import DecodeScheduler, SchedulerLimits
from decode_svc.sequence import Sequence
from decode_svc.speculation.prompt_lookup import PromptLookup
from decode_svc.speculation.proposer import NoProposer
from tests.support.fake_runner import FakeRunner, expected_tokens

BLOCK_SIZE = 4
VOCAB = 5  # few tokens: text repeats itself, so that prompt lookup finds something
MAX_MODEL_LEN = 64


class Collector:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None

    def on_step(self, output: StepOutput) -> None:
        assert self.finish_reason is None, "tokens after the end"
        self.token_ids.extend(token.token_id for token in output.tokens)
        self.finish_reason = output.finish_reason

    def on_failed(self, error: TwostrokeError) -> None:
        self.error = error


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    joins_at_step: int
    leaves_at_step: int | None  # the client goes away
    delivered: int  # tokens that the client has from elsewhere already


def make_engine(
    num_blocks: int, budget: int, max_sequences: int, *, speculates: bool, memory: int | None = None
) -> tuple[DecodeEngine, FakeRunner]:
    runner = FakeRunner(num_blocks, BLOCK_SIZE, VOCAB, memory)
    limits = SchedulerLimits(BLOCK_SIZE, budget, max_sequences, max_waiting=100, preemption_shield_tokens=8)
    proposer = PromptLookup(max_ngram=3, min_ngram=1) if speculates else NoProposer()
    scheduler = DecodeScheduler(BlockPool(num_blocks), limits)
    return DecodeEngine(runner, scheduler, proposer, SpeculationSettings(3, 4), clock=lambda: 1.0), runner


def make_sequence(number: int, ask: Ask, memory: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, stop_token_ids=ask.stop)
    return Sequence(
        request_id=RequestId(f"r{number}"),
        transfer_id=TransferId(number.to_bytes(16, "big")),
        prompt_token_ids=ask.prompt,
        sampling=params,
        root_hash=root_hash(b"model", b"tenant"),
        arrived_s=0.0,
        max_model_len=MAX_MODEL_LEN,
        output_token_ids=expected_tokens(ask.prompt, ask.max_tokens, VOCAB, ask.stop, memory)[: ask.delivered],
    )


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """`delivered` is cut to what there is by the test, since only it knows the text."""
    prompt = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)))
    max_tokens = draw(st.integers(1, 16))
    stop = frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=1)))
    return Ask(
        prompt,
        max_tokens,
        stop,
        joins_at_step=draw(st.integers(0, 10)),
        leaves_at_step=draw(st.none() | st.integers(1, 20)),
        delivered=draw(st.integers(0, 3)),
    )


def with_something_left(ask: Ask, memory: int | None) -> Ask:
    total = len(expected_tokens(ask.prompt, ask.max_tokens, VOCAB, ask.stop, memory))
    return replace(ask, delivered=min(ask.delivered, total - 1))


@settings(max_examples=200, deadline=None)
@given(
    wanted=st.lists(asks(), min_size=1, max_size=6),
    num_blocks=st.integers(10, 24),
    budget=st.integers(1, 24),
    max_sequences=st.integers(1, 6),
    speculates=st.booleans(),
    memory=st.sampled_from([None, 2]),
)
def test_every_answer_is_the_text_s_own(
    wanted: list[Ask], num_blocks: int, budget: int, max_sequences: int, speculates: bool, memory: int | None
) -> None:
    wanted = [with_something_left(ask, memory) for ask in wanted]
    engine, _ = make_engine(num_blocks, budget, max_sequences, speculates=speculates, memory=memory)
    sequences = [make_sequence(number, ask, memory) for number, ask in enumerate(wanted)]
    collectors = [Collector() for _ in wanted]
    for step in range(2_000):
        for ask, sequence, collector in zip(wanted, sequences, collectors, strict=True):
            if ask.joins_at_step == step:
                engine.submit(sequence, collector)
            if ask.leaves_at_step is not None and ask.leaves_at_step == step > ask.joins_at_step:
                assert engine.end(sequence).done()
        had_work = engine.step()
        engine.check_integrity()
        if not had_work and step > 20:
            break
    else:
        raise AssertionError("the engine never came to rest")
    assert engine.scheduler.pool.num_in_use == 0
    for ask, collector in zip(wanted, collectors, strict=True):
        expected = expected_tokens(ask.prompt, ask.max_tokens, VOCAB, ask.stop, memory)[ask.delivered :]
        if ask.leaves_at_step is None or ask.leaves_at_step <= ask.joins_at_step:
            assert collector.token_ids == expected
            ends_by_stop = bool(expected) and expected[-1] in ask.stop
            assert collector.finish_reason is (FinishReason.STOP if ends_by_stop else FinishReason.LENGTH)
        else:
            assert collector.token_ids == expected[: len(collector.token_ids)]


def test_speculation_takes_fewer_target_passes_on_text_that_repeats() -> None:
    passes = {}
    for speculates in (False, True):
        engine, runner = make_engine(64, 64, 4, speculates=speculates, memory=2)
        collector = Collector()
        engine.submit(make_sequence(1, Ask((0, 1), 48, frozenset(), 0, None, 0)), collector)
        while engine.step():
            pass
        passes[speculates] = runner.num_runs
        assert collector.token_ids == expected_tokens((0, 1), 48, VOCAB, memory=2)
    assert passes[False] == 48
    assert passes[True] < 24


def test_nothing_is_proposed_when_the_request_or_a_full_batch_says_so() -> None:
    engine, runner = make_engine(64, 64, 8, speculates=True, memory=2)
    for number in range(5):  # the engine proposes for batches of up to four
        engine.submit(make_sequence(number, Ask((0, 1), 20, frozenset(), 0, None, 0)), Collector())
    while engine.step():
        pass
    assert engine.totals.num_draft_tokens == 0
    assert runner.num_runs == 20
    sequence = make_sequence(9, Ask((0, 1), 20, frozenset(), 0, None, 0))
    sequence.sampling = replace(sequence.sampling, speculation=False)
    engine.submit(sequence, Collector())
    while engine.step():
        pass
    assert engine.totals.num_draft_tokens == 0


def test_a_sequence_that_fails_ends_alone() -> None:
    engine, runner = make_engine(32, 32, 4, speculates=False)
    good, bad = Collector(), Collector()
    engine.submit(make_sequence(1, Ask((1, 2, 3), 6, frozenset(), 0, None, 0)), good)
    engine.submit(make_sequence(2, Ask((4, 4, 4, 4, 4), 6, frozenset(), 0, None, 0)), bad)
    runner.poisoned_token = 4
    runner.vocab_size = 4  # nothing that is sampled is the poison
    while engine.step():
        pass
    assert bad.error is not None
    assert "NaN" in str(bad.error)
    assert not bad.token_ids
    assert good.token_ids == expected_tokens((1, 2, 3), 6, 4)
    assert engine.scheduler.pool.num_in_use == 0
    engine.check_integrity()
    assert len(engine.scheduler.pool.held_hashes()) == 2, "only the good text's full blocks may be found by others"
