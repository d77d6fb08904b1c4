"""The accounts of a transfer over a way that loses, damages and repeats frames: every block arrives, or the sender says
which one did not; what arrived is never written twice."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptFrame
from common.ids import TransferId
from common.kv.block_pool import BlockPool
from decode_svc.transfer import Transfer, TransferTable
from prefill_svc.sent_blocks import MAX_SENDS, Run, SentBlocks

BLOCK_SIZE = 4
NOWHERE = Run(0, 0)

fates = st.lists(st.sampled_from(["whole", "lost", "damaged", "misread", "twice"]), max_size=60)


class Simulation:
    """One frame at a time is on its way; `fates` says what happens to each, and those after them arrive whole."""

    def __init__(self, num_blocks: int, step: int, fates: list[str]) -> None:
        self.num_blocks = num_blocks
        self.table = TransferTable(BlockPool(num_blocks + 1), BLOCK_SIZE)
        self.transfer: Transfer = self.table.reserve(TransferId(bytes(16)), 1, num_blocks * BLOCK_SIZE, [], 0.0)
        self.sent = SentBlocks("decode")
        self.new = deque(Run(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))
        self.fates = deque(fates)
        self.num_sends = [0] * num_blocks
        self.highest = 0
        self.has_commit = False

    def run(self) -> None:
        """Raises CorruptFrame where the sender gives up."""
        while not (self.has_commit and not self.transfer.num_missing_blocks):
            run = self.sent.take_again() or (self.new.popleft() if self.new else None)
            number = self.sent.number_frame(run)
            for block in range(run.start, run.end) if run else ():
                self.num_sends[block] += 1
            fate = self.fates.popleft() if self.fates else "whole"
            for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
                self.arrive(number, run, fate)

    def arrive(self, number: int, run: Run | None, fate: str) -> None:
        damaged = NOWHERE
        if fate == "damaged":
            damaged = run or NOWHERE
        elif fate == "misread":
            damaged = Run(0, 1)
        else:
            self.highest = max(self.highest, number)
            if run is None:
                self.has_commit = True
            else:
                before = dict(self.transfer.blocks)
                taken = self.table.take_blocks(self.transfer, run.start, run.end - run.start, 0.0)
                assert not taken.keys() & before.keys(), "a block was written twice"
        missing = [Run(*found) for found in self.transfer.missing(to_the_end=self.has_commit)]
        self.sent.reported(self.highest, missing, damaged)


@given(st.integers(1, 9), st.integers(1, 4), fates)
def test_every_block_arrives_or_the_sender_gives_up(num_blocks: int, step: int, fates: list[str]) -> None:
    simulation = Simulation(num_blocks, step, fates)
    try:
        simulation.run()
    except CorruptFrame:
        assert max(simulation.num_sends) == MAX_SENDS
    else:
        assert simulation.transfer.num_missing_blocks == 0
        simulation.table.commit(simulation.transfer)
    assert max(simulation.num_sends) <= MAX_SENDS
    simulation.table.release(simulation.transfer)
    assert simulation.table.pool.num_in_use == simulation.table.pool.num_reserved == 0


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), st.sampled_from(["lost", "damaged"]))
def test_one_fault_costs_one_frame(num_blocks: int, step: int, position: int, fate: str) -> None:
    simulation = Simulation(num_blocks, step, ["whole"] * position + [fate])
    simulation.run()
    num_again = sum(sends - 1 for sends in simulation.num_sends)
    first = position * step
    assert num_again == max(0, min(step, num_blocks - first))
