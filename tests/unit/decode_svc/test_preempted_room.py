"""A preempted sequence is not overtaken by newcomers: else its client would wait for as long as others come."""

import pytest

from common.errors import NoRoom
from common.ids import RequestId, TransferId, mint_transfer_id
from common.kv.block_hash import root_hash
from common.kv.block_pool import BlockPool
from common.sampling import FinishReason, SamplingParams
from decode_svc.engine import DecodeEngine, SpeculationSettings, StepOutput
from decode_svc.kv_receiver import KVReceiver
from decode_svc.scheduler import DecodeScheduler, SchedulerLimits
from decode_svc.sequence import Sequence
from decode_svc.speculation.proposer import NoProposer
from decode_svc.transfer import TransferTable
from tests.support.fake_runner import FakeRunner

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 4, 8, 24


class Listener:
    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None

    def on_step(self, output: StepOutput) -> None:
        self.finish_reason = output.finish_reason

    def on_failed(self, error: Exception) -> None:
        raise AssertionError(error)


def submit(engine: DecodeEngine, number: int) -> Listener:
    sequence = Sequence(
        RequestId(str(number)),
        TransferId(bytes([number]) * 16),
        (number,) * BLOCK_SIZE,
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
        root_hash(b"f" * 32, b"s" * 32),
        arrived_s=0.0,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
    )
    listener = Listener()
    engine.submit(sequence, listener)
    return listener


async def test_newcomers_wait_until_the_preempted_have_gone_on() -> None:
    runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, 50)
    pool = BlockPool(NUM_BLOCKS)
    scheduler = DecodeScheduler(pool, SchedulerLimits(BLOCK_SIZE, 64, 8, 100, 100))
    engine = DecodeEngine(runner, scheduler, NoProposer(), SpeculationSettings(0, 0))
    receiver = KVReceiver(engine, TransferTable(pool, BLOCK_SIZE), runner.cache, 30.0)
    listeners = [submit(engine, 1), submit(engine, 2)]
    while not engine.totals.num_preemptions:
        assert engine.step()
    assert pool.num_available >= 2, "a short newcomer would have room"
    assert scheduler.preempted_blocks > pool.num_available
    with pytest.raises(NoRoom):
        receiver.reserve(mint_transfer_id(), 1, 1, [])
    while engine.step():
        pass
    assert [listener.finish_reason for listener in listeners] == [FinishReason.LENGTH] * 2
    assert scheduler.preempted_blocks == 0
    newcomer = mint_transfer_id()
    receiver.reserve(newcomer, 1, 1, [])
    receiver.release(newcomer, 1)
    engine.check_integrity()
    assert pool.num_in_use == pool.num_reserved == 0
