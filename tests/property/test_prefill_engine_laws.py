"""First tokens do not depend on chunks, on the cache, on who else is there; blocks return to baseline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import TwostrokeError
from common.ids import RequestId, TransferId
from common.kv.block_hash import block_hashes, root_hash
from common.kv.block_pool import BlockPool
from common.sampling import FinishReason, OutputToken, SamplingParams
from prefill_svc.engine import PrefillEngine
from prefill_svc.job import PrefillJob
from prefill_svc.scheduler import PrefillScheduler
from tests.support.fake_runner import FakeRunner, expected_tokens

BLOCK_SIZE = 4
VOCAB = 7
ROOT = root_hash(b"model", b"tenant")


class Collector:
    def __init__(self) -> None:
        self.token: OutputToken | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        self.ready_blocks: list[int] = []
        self.num_computed = 0

    def on_chunk(self, num_tokens: int, num_full_blocks: int, start_s: float, end_s: float) -> None:
        assert self.token is None
        self.num_computed += num_tokens
        self.ready_blocks.append(num_full_blocks)

    def on_first_token(self, token: OutputToken, finish_reason: FinishReason | None) -> None:
        assert self.token is None
        self.token, self.finish_reason = token, finish_reason

    def on_failed(self, error: TwostrokeError) -> None:
        self.error = error


def make_engine(
    num_blocks: int, budget: int, last_chunk_tokens: int | None = None
) -> tuple[PrefillEngine, FakeRunner, BlockPool]:
    runner = FakeRunner(num_blocks, BLOCK_SIZE, VOCAB)
    pool = BlockPool(num_blocks)
    scheduler = PrefillScheduler(pool, BLOCK_SIZE, budget, 100, last_chunk_tokens)
    return PrefillEngine(runner, scheduler, clock=lambda: 1.0), runner, pool


def make_job(number: int, prompt: tuple[int, ...], max_tokens: int = 4) -> PrefillJob:
    return PrefillJob(
        request_id=RequestId(f"r{number}"),
        transfer_id=TransferId(number.to_bytes(16, "big")),
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        block_hashes=block_hashes(ROOT, prompt, BLOCK_SIZE),
        arrived_s=0.0,
    )


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    wanted=st.lists(st.tuples(prompts, st.integers(0, 6), st.none() | st.integers(0, 8)), min_size=1, max_size=8),
    num_blocks=st.integers(8, 20),
    budget=st.integers(1, 40),
    last_chunk_tokens=st.none() | st.integers(1, 5),
)
def test_every_first_token_is_the_prompt_s_own(
    wanted: list[tuple[tuple[int, ...], int, int | None]], num_blocks: int, budget: int, last_chunk_tokens: int | None
) -> None:
    engine, _, pool = make_engine(num_blocks, budget, last_chunk_tokens)
    jobs = [make_job(number, prompt) for number, (prompt, _, _) in enumerate(wanted)]
    collectors = [Collector() for _ in wanted]
    ended: set[int] = set()
    for step in range(1_000):
        for number, (_, joins_at, leaves_at) in enumerate(wanted):
            if step == joins_at:
                engine.submit(jobs[number], collectors[number])
            if leaves_at is not None and step == joins_at + leaves_at:
                engine.end(jobs[number]).result(timeout=0)
                ended.add(number)
        had_work = engine.step()
        engine.check_integrity()
        for number, collector in enumerate(collectors):
            if collector.token is not None and number not in ended and step % 2:
                engine.end(jobs[number]).result(timeout=0)  # handed off
                ended.add(number)
                had_work = True  # somebody may have waited for its blocks
        if not had_work and step > 20:
            break
    assert pool.num_in_use == 0
    for (prompt, _, leaves_at), collector, job in zip(wanted, collectors, jobs, strict=True):
        if leaves_at is None:
            assert collector.token is not None
        if collector.token is not None:
            assert [collector.token.token_id] == expected_tokens(prompt, 1, VOCAB)
            assert collector.num_computed + job.num_cached_tokens == len(prompt)
            assert 0 <= job.num_cached_tokens < len(prompt)
            assert collector.ready_blocks == sorted(collector.ready_blocks)
            assert collector.ready_blocks[-1] == len(prompt) // BLOCK_SIZE


@pytest.mark.parametrize(
    ("length", "budget", "chunks"),
    [
        (16, 64, [16]),  # short enough: four times what the last chunk should have
        (17, 64, [12, 5]),
        (40, 64, [36, 4]),
        (43, 64, [36, 7]),  # the chunk before ends with a block
        (40, 20, [20, 16, 4]),
        (44, 20, [20, 20, 4]),  # the budget has left little
    ],
)
def test_a_long_prompt_s_last_chunk_is_short(length: int, budget: int, chunks: list[int]) -> None:
    engine, runner, _ = make_engine(16, budget, last_chunk_tokens=4)
    engine.submit(make_job(0, tuple(n % VOCAB for n in range(length))), Collector())
    for expected in chunks:
        before = runner.num_tokens
        engine.step()
        assert runner.num_tokens - before == expected
    assert not engine.step()


def test_a_second_prompt_computes_only_what_the_first_did_not() -> None:
    engine, runner, _ = make_engine(16, 64)
    for number, prompt in enumerate([tuple(range(7)) * 2, (*tuple(range(7)), 0, 6, 6)]):
        before = runner.num_tokens
        engine.submit(make_job(number, prompt), Collector())
        engine.step()
    assert runner.num_tokens - before == 10 - 8, "eight tokens, two blocks, are the same"


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    engine, runner, _ = make_engine(16, 64)
    prompt = (1, 2, 3, 4, 5, 6, 0, 1)
    for number in range(2):
        before = runner.num_tokens
        collector = Collector()
        job = make_job(number, prompt)
        engine.submit(job, collector)
        engine.step()
    assert runner.num_tokens - before == BLOCK_SIZE
    assert job.num_cached_tokens == BLOCK_SIZE
    assert collector.token is not None


def test_a_budget_is_never_exceeded_and_prompts_finish_in_order_of_arrival() -> None:
    engine, runner, _ = make_engine(32, 6)
    collectors = [Collector() for _ in range(3)]
    for number, collector in enumerate(collectors):
        engine.submit(make_job(number, (number,) * 10), collector)
    finished: list[int] = []
    while True:
        before = runner.num_tokens
        if not engine.step():
            break
        assert runner.num_tokens - before <= 6
        finished.extend(n for n, c in enumerate(collectors) if c.token is not None and n not in finished)
    assert finished == [0, 1, 2]


def test_a_job_that_fails_ends_alone_and_leaves_no_name_behind() -> None:
    engine, runner, pool = make_engine(16, 64)
    good, bad = Collector(), Collector()
    runner.poisoned_token = 6
    engine.submit(make_job(1, (1, 2, 3, 4, 5)), good)
    engine.submit(make_job(2, (6, 6, 6, 6, 6)), bad)
    engine.step()
    assert bad.error is not None
    assert bad.token is None
    assert good.token is not None
    assert len(pool.held_hashes()) == 1
    engine.check_integrity()


def test_a_one_token_request_finishes_with_its_first_token() -> None:
    engine, _, _ = make_engine(16, 64)
    collector = Collector()
    engine.submit(make_job(1, (1, 2, 3), max_tokens=1), collector)
    engine.step()
    assert collector.finish_reason is FinishReason.LENGTH
