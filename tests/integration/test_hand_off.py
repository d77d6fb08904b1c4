"""The hand-off between a real prefill and a real decode service, over real gRPC, with blocks of a fake model."""

import asyncio
import random
from itertools import count

import pytest

from common.errors import (
    BadRequest,
    FingerprintMismatch,
    LeaseExpired,
    NoRoom,
    StaleGeneration,
    TransferError,
    UnknownTransfer,
)
from common.ids import TransferId, mint_transfer_id
from common.kv.layout import KVFormat
from common.kv.wire import Frame, make_frame, seal
from common.pb import decode_pb2
from common.sampling import SamplingParams
from common.telemetry import names
from tests.support.fake_runner import expected_tokens
from tests.support.silent_worker import accepts_and_says_nothing
from tests.support.worker_pair import BLOCK_SIZE, LEASE_S, VOCAB, WorkerPair, error_of, worker_pair

PROMPT = tuple(range(1, 19))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17, 40])
async def test_the_answer_is_the_text_s_own(length: int) -> None:
    prompt = tuple(range(1, length + 1))
    async with worker_pair() as pair:
        assert await pair.answer(prompt, GREEDY) == expected_tokens(prompt, 12, VOCAB)
        assert pair.decode_engine.totals.computed_prompt_tokens == 0, "decode computed what it had received"


@pytest.mark.parametrize("length", [1, 4, 17, 40])
async def test_an_unquantized_prefill_feeds_a_quantized_decode(length: int) -> None:
    prompt = tuple(n % (VOCAB - 1) + 1 for n in range(7, length + 7))
    async with worker_pair(decode_format=KVFormat.INT8) as pair:
        assert await pair.answer(prompt, GREEDY) == expected_tokens(prompt, 12, VOCAB)
        assert pair.decode_engine.totals.computed_prompt_tokens == 0
        sent = -(-length // BLOCK_SIZE) * pair.decode_runner.cache.layout.block_bytes
        assert pair.receiver.kv_bytes_received == sent


async def test_many_at_once_and_again_with_warm_caches() -> None:
    prompts = [(*PROMPT[: 2 * n + 1], n) for n in range(8)]
    async with worker_pair() as pair:
        for _ in range(2):
            answers = await asyncio.gather(*(pair.answer(prompt, GREEDY) for prompt in prompts))
            assert answers == [expected_tokens(prompt, 12, VOCAB) for prompt in prompts]


async def test_blocks_that_decode_holds_are_not_sent() -> None:
    async with worker_pair() as pair:
        await pair.answer(PROMPT, GREEDY)
        before = pair.receiver.kv_bytes_received
        ticket = await pair.reserve(PROMPT, TransferId(bytes(16)))
        assert ticket.num_held_blocks == len(PROMPT) // BLOCK_SIZE
        pair.receiver.release(TransferId(bytes(16)), 1)
        assert await pair.answer(PROMPT, GREEDY) == expected_tokens(PROMPT, 12, VOCAB)
        assert pair.receiver.kv_bytes_received - before == pair.decode_runner.cache.layout.block_bytes


async def test_a_first_token_that_ends_the_request_needs_no_decode() -> None:
    async with worker_pair() as pair:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        assert await pair.answer(PROMPT, params) == expected_tokens(PROMPT, 1, VOCAB)


async def test_the_first_token_does_not_wait_for_the_transfer() -> None:
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        events = pair.run_prefill(PROMPT, GREEDY, transfer_id, ticket)
        first = await events.read()
        assert first.first_token.token.token_id == expected_tokens(PROMPT, 1, VOCAB)[0]
        handed_off = await events.read()
        assert handed_off.handed_off.num_blocks_pushed == 5
        tokens = [t.token_id async for e in pair.generate(PROMPT, GREEDY, transfer_id, ticket) for t in e.tokens]
        assert tokens == expected_tokens(PROMPT, 12, VOCAB)[1:]


async def test_decode_alone_computes_the_prompt_and_goes_on_after_delivered_tokens() -> None:
    expected = expected_tokens(PROMPT, 12, VOCAB)
    async with worker_pair() as pair:
        for delivered in (0, 5, 11):
            call = pair.generate(PROMPT, GREEDY, mint_transfer_id(), None, delivered=expected[:delivered])
            assert [t.token_id async for e in call for t in e.tokens] == expected[delivered:]


@pytest.mark.parametrize("num_delivered", [1, 4, 10])
async def test_a_hand_off_goes_on_after_delivered_tokens_and_computes_them_alone(num_delivered: int) -> None:
    """The prompt is in prefill's pool; its penalties see the delivered tokens as output, not as prompt."""
    params = SamplingParams(max_tokens=12, seed=3, temperature=2.0, frequency_penalty=2.0, presence_penalty=1.0)
    async with worker_pair() as pair:
        whole = await pair.answer(PROMPT, params)
        pair.decode_engine.scheduler.pool.clear_cache()
        before = pair.prefill_engine.totals.computed_prompt_tokens
        assert await pair.answer(PROMPT, params, whole[:num_delivered]) == whole[num_delivered:]
        num_cached = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
        computed = pair.prefill_engine.totals.computed_prompt_tokens - before
        assert computed == len(PROMPT) + num_delivered - num_cached
        assert pair.decode_engine.totals.computed_prompt_tokens == 0


async def test_the_last_token_of_a_resumed_hand_off_needs_no_decode() -> None:
    expected = expected_tokens(PROMPT, 12, VOCAB)
    async with worker_pair() as pair:
        assert await pair.answer(PROMPT, GREEDY, expected[:11]) == expected[11:]
        assert pair.decode_engine.totals.output_tokens == 0


async def test_a_decode_step_after_the_commit_computes_one_position() -> None:
    async with worker_pair() as pair:
        await pair.answer(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, speculation=False))
        assert pair.decode_runner.num_tokens == 2


async def test_a_ticket_cannot_be_forged_or_used_twice() -> None:
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        forged = decode_pb2.Ticket(ticket=ticket.ticket[:-1] + bytes([ticket.ticket[-1] ^ 1]))
        assert isinstance(await error_of(pair.generate(PROMPT, GREEDY, transfer_id, forged)), UnknownTransfer)
        frame = Frame(decode_pb2.PushFrame(ticket=forged.ticket))
        assert isinstance(await error_of(pair.push(iter_of([frame]))), UnknownTransfer)
        assert isinstance(await error_of(pair.reserve(PROMPT, transfer_id)), StaleGeneration)
        assert pair.receiver.release(transfer_id, 1) == 0, "no block was taken"


async def test_an_older_generation_s_ticket_is_refused() -> None:
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        old = await pair.reserve(PROMPT, transfer_id, generation=1)
        new = await pair.reserve(PROMPT, transfer_id, generation=2)
        frame = Frame(decode_pb2.PushFrame(ticket=old.ticket))
        assert isinstance(await error_of(pair.push(iter_of([frame]))), StaleGeneration)
        assert old.ticket != new.ticket
        assert pair.receiver.release(transfer_id, 1) == 0, "an older generation's release ends nothing newer"
        pair.receiver.release(transfer_id, 2)


async def test_a_reserve_that_its_own_release_has_overtaken_is_refused() -> None:
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        assert await pair.decode_servicer.release(transfer_id, 1) == 0
        assert isinstance(await error_of(pair.reserve(PROMPT, transfer_id, generation=1)), StaleGeneration)
        await pair.reserve(PROMPT, transfer_id, generation=2)
        await pair.decode_servicer.release(transfer_id, 2)


async def test_a_push_that_breaks_off_tells_the_waiting_stream_at_once() -> None:
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        decoding = pair.generate(PROMPT, GREEDY, transfer_id, ticket)
        frame = make_frame(0, 0, 1, bytes(pair.decode_runner.cache.layout.block_bytes))
        frame.head.ticket = ticket.ticket
        assert [ack async for ack in pair.push(iter_of([frame]))] == []
        assert isinstance(await error_of(decoding), TransferError)


async def test_a_full_decode_refuses_before_any_work() -> None:
    async with worker_pair(decode_blocks=8) as pair:
        first = mint_transfer_id()
        await pair.reserve(PROMPT, first)
        error = await error_of(pair.reserve(PROMPT, mint_transfer_id()))
        assert isinstance(error, NoRoom)
        assert error.retry_after_s == 1
        assert isinstance(await error_of(pair.reserve(tuple(range(40)), mint_transfer_id())), BadRequest)
        pair.receiver.release(first, 1)
        await pair.answer(PROMPT, GREEDY)


async def test_a_reservation_that_nobody_uses_expires_and_a_waiting_one_does_not() -> None:
    async with worker_pair() as pair:
        unused, waiting = mint_transfer_id(), mint_transfer_id()
        ticket = await pair.reserve(PROMPT, unused)
        waiting_ticket = await pair.reserve(PROMPT, waiting)
        decoding = pair.generate(PROMPT, GREEDY, waiting, waiting_ticket)
        first = pair.run_prefill(PROMPT, GREEDY, waiting, waiting_ticket)
        await first.read()  # the queue before prefill may have been long
        pair.receiver_clock.now_s += LEASE_S + 1
        while pair.receiver.expire() == 0:
            await asyncio.sleep(0)
        assert isinstance(
            await error_of(pair.generate(PROMPT, GREEDY, unused, ticket)), (UnknownTransfer, LeaseExpired)
        )
        assert [t.token_id async for e in decoding for t in e.tokens] == expected_tokens(PROMPT, 12, VOCAB)[1:]


async def test_a_lease_is_a_time_without_progress_and_each_new_block_begins_another() -> None:
    """Though the whole transfer takes several; a block that is here already is no progress."""
    async with worker_pair() as pair:
        ticket = await pair.reserve(PROMPT, mint_transfer_id())
        pushing = pair.push()
        sequence_numbers = count()

        async def push(block: int) -> decode_pb2.PushAck:
            """Never the first block, so that something is missing: then each frame is answered at once."""
            frame = make_frame(next(sequence_numbers), block, 1, bytes(pair.decode_runner.cache.layout.block_bytes))
            frame.head.ticket = ticket.ticket
            await pushing.write(frame)
            ack: decode_pb2.PushAck = await pushing.read()
            return ack

        for number, block in enumerate((4, 3, 2, 1)):
            pair.receiver_clock.now_s += 0.9 * LEASE_S
            assert (await push(block)).sequence_number == number
            assert pair.receiver.expire() == 0
        pair.receiver_clock.now_s += 0.9 * LEASE_S
        assert (await push(1)).sequence_number == 4
        pair.receiver_clock.now_s += 0.2 * LEASE_S
        assert pair.receiver.expire() == 1
        assert isinstance(await error_of(push(1)), TransferError)


async def test_other_models_layouts_and_bad_tokens_are_refused_by_name() -> None:
    async with worker_pair() as pair:
        error = await error_of(pair.reserve(PROMPT, mint_transfer_id(), fingerprint=b"x" * 32))
        assert isinstance(error, FingerprintMismatch)
        assert (b"x" * 32).hex() in str(error)
        assert (b"f" * 32).hex() in str(error)
        for prompt in ((), (VOCAB,), tuple([1] * 200)):
            assert isinstance(await error_of(pair.run_prefill(prompt, GREEDY, mint_transfer_id(), None)), BadRequest)
            assert isinstance(await error_of(pair.generate(prompt, GREEDY, mint_transfer_id(), None)), BadRequest)
        biased = SamplingParams(logit_bias={VOCAB: 1.0})
        assert isinstance(await error_of(pair.run_prefill(PROMPT, biased, mint_transfer_id(), None)), BadRequest)


async def test_a_hand_off_that_does_not_fit_its_request_is_refused_and_decode_lives_on() -> None:
    """The first token is read by the model next: one outside the vocabulary would end the worker."""
    async with worker_pair() as pair:
        for first_token, ticket_of, wanted in (
            (VOCAB, None, f"first token is {VOCAB}, outside the vocabulary"),
            (2**32 - 1, None, "outside the vocabulary"),
            (1, mint_transfer_id(), "the ticket is of transfer"),
        ):
            transfer_id = mint_transfer_id()
            ticket = await pair.reserve(PROMPT, transfer_id)
            decoding = pair.generate(PROMPT, GREEDY, ticket_of or transfer_id, ticket)
            blocks = [make_frame(0, 0, 5, bytes(5 * pair.decode_runner.cache.layout.block_bytes))]
            blocks[0].head.ticket = ticket.ticket
            blocks[0].head.commit.CopyFrom(decode_pb2.Commit(num_blocks=5, num_prompt_tokens=len(PROMPT)))
            blocks[0].head.commit.first_token.token_id = first_token
            seal(blocks[0])
            pushing = pair.push(iter_of(blocks))
            async for _ in pushing:
                pass
            assert wanted in str(await error_of(decoding))
        assert await pair.answer(PROMPT, GREEDY) == expected_tokens(PROMPT, 12, VOCAB)


@pytest.mark.parametrize("raw", [b"", b"short", b"x" * 17])
async def test_a_transfer_id_of_another_length_is_refused(raw: bytes) -> None:
    async with worker_pair() as pair:
        transfer_id = TransferId(raw)
        for call in (
            pair.reserve(PROMPT, transfer_id),
            pair.run_prefill(PROMPT, GREEDY, transfer_id, None),
            pair.generate(PROMPT, GREEDY, transfer_id, None),
        ):
            error = await error_of(call)
            assert isinstance(error, BadRequest)
            assert (error.param, f"{len(raw)} bytes" in error.message) == ("transfer_id", True)


async def test_release_ends_a_running_prefill_and_a_running_decode() -> None:
    async with worker_pair(prefill_budget=1) as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        running = pair.run_prefill(PROMPT, GREEDY, transfer_id, ticket)
        decoding = pair.generate(PROMPT, GREEDY, transfer_id, ticket)
        while not pair.prefill_servicer.num_active:
            await asyncio.sleep(0)
        await pair.prefill_servicer.release(transfer_id, 1)
        assert await pair.prefill_servicer.release(transfer_id, 1) == 0
        await pair.decode_servicer.release(transfer_id, 1)
        await error_of(running)
        await error_of(decoding)


async def test_each_side_says_how_many_blocks_a_release_freed() -> None:
    """Prefill between its last chunk and the hand-off, decode between the commit and the first step."""
    num_blocks = -(-len(PROMPT) // BLOCK_SIZE)
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        async for _ in pair.run_prefill(PROMPT, GREEDY, transfer_id, ticket):
            pass
        assert await pair.decode_servicer.release(transfer_id, 1) == num_blocks
        assert await pair.decode_servicer.release(transfer_id, 1) == 0
        with accepts_and_says_nothing() as pair.decode_address:
            running = pair.run_prefill(PROMPT, GREEDY, transfer_id, ticket, generation=2)
            assert (await running.read()).HasField("first_token")
            assert await pair.prefill_servicer.release(transfer_id, 2) == num_blocks
            assert await pair.prefill_servicer.release(transfer_id, 2) == 0
            await error_of(running)


async def test_random_cancels_at_every_stage_end_at_baseline() -> None:
    """The caller goes away after a random number of turns of the event loop."""
    turns = random.Random(7)

    async def one(pair: WorkerPair, number: int) -> None:
        task = asyncio.create_task(pair.answer((*PROMPT, number % VOCAB), GREEDY))
        for _ in range(turns.randrange(60)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with worker_pair() as pair:
        for start in range(0, 200, 4):
            await asyncio.gather(*(one(pair, start + i) for i in range(4)))
        await expire_all(pair)
        assert await pair.answer(PROMPT, GREEDY) == expected_tokens(PROMPT, 12, VOCAB)
        await expire_all(pair)


async def expire_all(pair: WorkerPair) -> None:
    """The lease ends again and again: a cancelled call may still arrive."""
    while pair.receiver.num_open:
        pair.receiver_clock.now_s += LEASE_S + 1
        pair.receiver.expire()
        await asyncio.sleep(0)


async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async with worker_pair() as pair:
        transfer_id = mint_transfer_id()
        ticket = await pair.reserve(PROMPT, transfer_id)
        decoding = pair.generate(PROMPT, GREEDY, transfer_id, ticket)
        running = pair.run_prefill(PROMPT, GREEDY, transfer_id, ticket)
        await running.read()
        drains = [asyncio.create_task(pair.prefill_servicer.drain()), asyncio.create_task(pair.decode_servicer.drain())]
        tokens = [t.token_id async for e in decoding for t in e.tokens]
        assert tokens == expected_tokens(PROMPT, 12, VOCAB)[1:]
        await asyncio.gather(*drains)
        refused = await error_of(pair.run_prefill(PROMPT, GREEDY, mint_transfer_id(), None))
        assert refused.http_status == 503
        assert (await error_of(pair.reserve(PROMPT, mint_transfer_id()))).http_status == 503


async def test_spans_of_all_hops() -> None:
    async with worker_pair() as pair:
        await pair.answer(PROMPT, GREEDY)
        found = [span.name for span in pair.spans.get_finished_spans()]
        for name in (
            names.SPAN_PREFILL_QUEUE,
            names.SPAN_PREFILL_CHUNK,
            names.SPAN_KV_PUSH,
            names.SPAN_KV_COMMIT,
            names.SPAN_DECODE_QUEUE,
            names.SPAN_DECODE_STREAM,
        ):
            assert name in found
        assert found.count(names.SPAN_PREFILL_CHUNK) == 3, "18 tokens, 8 a step"


async def iter_of(frames: list[Frame]):
    for frame in frames:
        yield frame
