"""Frames that are damaged, lost, repeated or overtaken on their way: sent again, or computed again from the last good
block; the answer is the same, and no unverified byte is read."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from common.errors import CorruptFrame, PushAbandoned, TransferError
from common.ids import mint_transfer_id
from common.kv.wire import Frame, make_frame
from common.pb import decode_pb2
from common.sampling import SamplingParams
from prefill_svc import kv_sender
from prefill_svc.sent_blocks import MAX_SENDS
from tests.support.fake_runner import expected_tokens
from tests.support.frame_faults import ALL_FAULTS, FaultyWay, drop, flip_payload_bit, pass_on, repeat
from tests.support.worker_pair import BLOCK_SIZE, VOCAB, WorkerPair, error_of, worker_pair

PROMPT = tuple(range(1, 19))  # five blocks, in frames of two, two and one
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
EXPECTED = expected_tokens(PROMPT, 12, VOCAB)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "ASK_AGAIN_S", 0.02)


async def check_answer(pair: WorkerPair) -> None:
    assert await pair.answer(PROMPT, GREEDY) == EXPECTED
    assert pair.decode_engine.totals.computed_prompt_tokens == 0, "decode computed what it had received"


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", ALL_FAULTS)
async def test_one_faulty_frame_is_sent_again_and_the_transfer_goes_on(name: str, number: int) -> None:
    """Frame 3 is the commit."""
    async with worker_pair() as pair:
        way = FaultyWay(lambda index, _: ALL_FAULTS[name] if index == number else pass_on)
        way.put_before(pair.receiver)
        await check_answer(pair)
        num_blocks = (2, 2, 1, 0)[number] if name != "repeat" else 0
        assert pair.prefill_servicer.num_refetched_blocks >= num_blocks
        # A damaged frame that names another place costs a block that was well.
        assert pair.receiver.num_refetched_blocks - num_blocks in ((0, 1) if name == "move" else (0,))
        assert way.num_frames >= 5 or name == "repeat"


async def test_overtaken_frames_are_taken_as_they_come() -> None:
    async with worker_pair() as pair:
        FaultyWay(lambda *_: pass_on, overtake=True).put_before(pair.receiver)
        await check_answer(pair)


async def test_every_frame_three_times_changes_nothing() -> None:
    async with worker_pair() as pair:
        FaultyWay(lambda *_: repeat).put_before(pair.receiver)
        await check_answer(pair)
        assert pair.receiver.kv_bytes_received == 5 * pair.decode_runner.cache.layout.block_bytes


@pytest.mark.parametrize("overtake", [False, True])
async def test_any_faults_in_any_order_never_change_an_answer(overtake: bool) -> None:
    chance = random.Random(5)
    faults = [*ALL_FAULTS.values()]
    async with worker_pair(prefill_budget=3) as pair:
        way = FaultyWay(lambda *_: chance.choice(faults) if chance.random() < 0.2 else pass_on, overtake=overtake)
        way.put_before(pair.receiver)
        prompts = [(number, *PROMPT, *PROMPT[: number % 7]) for number in range(15)]
        for prompt in prompts:
            assert await pair.answer(prompt, GREEDY) == expected_tokens(prompt, 12, VOCAB)
        assert pair.receiver.num_refetched_blocks > 5, "too few faults to show anything"


def damage_block(block: int) -> FaultyWay:
    """The way damages every frame with this block."""

    def choose(_: int, frame: Frame) -> object:
        return flip_payload_bit if 0 <= block - frame.head.first_block < frame.head.num_blocks else pass_on

    return FaultyWay(choose)  # type: ignore[arg-type]


async def test_a_block_that_never_arrives_whole_is_given_up_and_decode_goes_on_from_the_last_good_one() -> None:
    async with worker_pair() as pair:
        way = damage_block(2)
        way.put_before(pair.receiver)
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        decoding = pair.generate(PROMPT, GREEDY, transfer_id, ticket)
        running = pair.run_prefill(PROMPT, GREEDY, transfer_id, ticket)
        first = await running.read()
        error = await error_of(running)
        assert isinstance(error, CorruptFrame)
        assert f"block 2 did not arrive whole at decode worker {pair.decode_address}" in error.message
        assert f"in {MAX_SENDS} sendings" in error.message
        assert isinstance(await error_of(decoding), TransferError)
        delivered = [first.first_token.token.token_id]
        again = pair.generate(PROMPT, GREEDY, mint_transfer_id(), None, delivered)
        events = [event async for event in again]
        assert [t.token_id for event in events for t in event.tokens] == EXPECTED[1:]
        assert events[0].stats.num_cached_tokens == 2 * BLOCK_SIZE, "the two verified blocks were computed again"
        assert pair.decode_engine.totals.computed_prompt_tokens == len(PROMPT) - 2 * BLOCK_SIZE


async def test_the_sender_dies_and_the_verified_blocks_stay() -> None:
    """Three blocks came, then the call broke; the third is behind a gap and cannot be used."""
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        decoding = pair.generate(PROMPT, GREEDY, transfer_id, ticket)
        while not pair.receiver.is_waited_for(transfer_id):
            await asyncio.sleep(0)
        assert await pair.answer(PROMPT[:17], GREEDY)  # fills prefill's pool with the same first blocks
        hashes = pair.block_hashes(PROMPT)
        source = [
            pair.prefill_engine._runner.cache.read_blocks([block_id], BLOCK_SIZE)
            for block_id in pair.prefill_pool.lookup(hashes)
        ]
        pair.decode_engine.scheduler.pool.clear_cache()
        frames = [make_frame(number, block, 1, source[block]) for number, block in enumerate((0, 1, 3))]
        for frame in frames:
            frame.head.ticket = ticket.ticket
        acks = [ack async for ack in pair.push(iter_of(frames))]
        assert [(run.first_block, run.num_blocks) for run in acks[-1].missing] == [(2, 1)]
        assert isinstance(await error_of(decoding), PushAbandoned)
        assert pair.decode_engine.count_held(hashes) == 2
        computed = pair.decode_engine.totals.computed_prompt_tokens
        again = pair.generate(PROMPT, GREEDY, mint_transfer_id(), None)
        assert [t.token_id async for event in again for t in event.tokens] == EXPECTED
        assert pair.decode_engine.totals.computed_prompt_tokens - computed == len(PROMPT) - 2 * BLOCK_SIZE


async def test_blocks_that_nobody_confirmed_get_no_name() -> None:
    """The reservation's names are the caller's word until a Generate call brings the tokens."""
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        frame = make_frame(0, 0, 2, bytes(2 * pair.decode_runner.cache.layout.block_bytes))
        frame.head.ticket = ticket.ticket
        async for _ in pair.push(iter_of([frame])):
            pass
        assert pair.decode_engine.count_held(pair.block_hashes(PROMPT)) == 0


@pytest.mark.parametrize("run", [(0, 6), (5, 1), (1 << 31, 1)])
async def test_blocks_that_were_not_reserved_end_the_transfer(run: tuple[int, int]) -> None:
    async with worker_pair() as pair:
        ticket = await pair.reserve(PROMPT, mint_transfer_id())
        frame = make_frame(0, *run, bytes(run[1] * pair.decode_runner.cache.layout.block_bytes))
        frame.head.ticket = ticket.ticket
        error = await error_of(pair.push(iter_of([frame])))
        assert isinstance(error, CorruptFrame)
        assert f"blocks {run[0]} to {run[0] + run[1]} came; 5 blocks were reserved" in error.message


async def test_garbage_without_end_is_refused_at_last() -> None:
    async with worker_pair() as pair:
        ticket = await pair.reserve(PROMPT, mint_transfer_id())
        frame = Frame(decode_pb2.PushFrame(ticket=ticket.ticket, num_blocks=1), (b"short",))
        acknowledged = asyncio.Queue[decode_pb2.PushAck]()

        async def one_after_the_other() -> AsyncIterator[Frame]:
            for _ in range(1000):
                yield frame
                await acknowledged.get()

        async def pushed() -> None:
            async for ack in pair.push(one_after_the_other()):
                acknowledged.put_nowait(ack)

        error = await error_of(pushed())
        acknowledged.put_nowait(decode_pb2.PushAck())
        assert isinstance(error, CorruptFrame)


async def test_a_transfer_that_never_commits_ends_with_its_caller() -> None:
    """Every commit is lost: the sender asks again for as long as somebody waits."""
    async with worker_pair() as pair:
        FaultyWay(lambda _, frame: drop if frame.head.HasField("commit") else pass_on).put_before(pair.receiver)
        task = asyncio.create_task(pair.answer(PROMPT, GREEDY))
        while pair.receiver.kv_bytes_received < 5 * pair.decode_runner.cache.layout.block_bytes:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def iter_of(frames: list[Frame]):
    for frame in frames:
        yield frame
