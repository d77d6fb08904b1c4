"""The accounts of transfers: any order of reserve, frames, commit, hand-over, release returns to baseline."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from common.errors import BadRequest, CorruptFrame, NoRoom, StaleGeneration, TransferError, UnknownTransfer
from common.ids import BlockHash, TransferId
from common.kv.block_pool import BlockPool
from common.kv.block_table import BlockTable
from decode_svc.transfer import LEGAL_TRANSITIONS, Transfer, TransferState, TransferTable

NUM_BLOCKS = 12
BLOCK_SIZE = 4


class TransferMachine(RuleBasedStateMachine):
    transfers = Bundle("transfers")
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.table = TransferTable(self.pool, BLOCK_SIZE)
        self.owned: list[BlockTable] = []
        self.count = 0

    @rule(target=transfers, num_tokens=st.integers(1, 60), text=st.integers(0, 3))
    def reserve(self, num_tokens: int, text: int) -> object:
        self.count += 1
        before = (self.pool.num_available, self.pool.num_in_use)
        hashes = [BlockHash(bytes([text, index]) * 8) for index in range(num_tokens // BLOCK_SIZE)]
        try:
            transfer = self.table.reserve(TransferId(self.count.to_bytes(16, "big")), 1, num_tokens, hashes, 0.0)
        except (NoRoom, BadRequest):
            assert before == (self.pool.num_available, self.pool.num_in_use), "a refusal changed the accounts"
            return multiple()
        grows_inside = transfer.num_blocks == NUM_BLOCKS and num_tokens % BLOCK_SIZE
        assert self.pool.num_available >= 1 or grows_inside, "there is no room to grow into"
        assert transfer.num_held_blocks == len(self.pool.lookup(hashes))
        return transfer

    @rule(transfer=transfers)
    def reserve_again(self, transfer: Transfer) -> None:
        if transfer.state is TransferState.ENDED:
            return
        try:
            self.table.reserve(transfer.transfer_id, 1, 1, [], 0.0)
        except StaleGeneration:
            return
        raise AssertionError("one transfer was reserved twice")

    @rule(transfer=transfers, first=st.integers(0, 15), count=st.integers(0, 5))
    def frame(self, transfer: Transfer, first: int, count: int) -> None:
        """Any run, in any order, again and again."""
        if transfer.state not in (TransferState.RESERVED, TransferState.RECEIVING):
            return
        before = dict(transfer.blocks)
        try:
            taken = self.table.take_blocks(transfer, first, count, 1.0)
        except CorruptFrame:
            assert count == 0 or first + count > transfer.num_blocks
            assert transfer.blocks == before
            return
        assert set(taken) == set(range(first, first + count)) - set(before), "blocks that are here stay as they are"
        assert transfer.blocks == before | taken

    @rule(transfer=transfers)
    def commit(self, transfer: Transfer) -> None:
        if transfer.state not in (TransferState.RESERVED, TransferState.RECEIVING):
            return
        missing = [index for start, end in transfer.missing(to_the_end=True) for index in range(start, end)]
        assert missing == [index for index in range(transfer.num_blocks) if index not in transfer.blocks]
        if not missing:
            self.table.check_commit(transfer, transfer.num_blocks, transfer.num_prompt_tokens)
            self.table.commit(transfer)

    @rule(transfer=transfers, num_blocks=st.integers(-1, 1), num_tokens=st.integers(-1, 1))
    def wrong_commit(self, transfer: Transfer, num_blocks: int, num_tokens: int) -> None:
        if (num_blocks, num_tokens) == (0, 0):
            return
        with pytest.raises(CorruptFrame):
            self.table.check_commit(transfer, transfer.num_blocks + num_blocks, transfer.num_prompt_tokens + num_tokens)

    @rule(target=tables, transfer=transfers, text=st.integers(0, 3))
    def hand_over(self, transfer: Transfer, text: int) -> object:
        if transfer.state is not TransferState.COMMITTED:
            return multiple()
        table = self.table.hand_over(transfer)
        assert len(table.block_ids) == transfer.num_blocks
        for index in range(table.num_hashed, transfer.num_prompt_tokens // BLOCK_SIZE):
            self.pool.register(table.block_ids[index], BlockHash(bytes([text, index]) * 8))
        self.owned.append(table)
        return table

    @rule(table=consumes(tables))
    def sequence_ends(self, table: BlockTable) -> None:
        self.owned.remove(table)
        self.pool.free(table.block_ids)

    @rule(transfer=transfers, is_confirmed=st.booleans())
    def release(self, transfer: Transfer, is_confirmed: bool) -> None:
        was_open = transfer.state is not TransferState.ENDED
        transfer.is_confirmed = is_confirmed
        num_kept = min(transfer.num_leading_blocks, len(transfer.hashes)) if is_confirmed else 0
        self.table.release(transfer)
        if was_open:
            assert len(self.pool.lookup(transfer.hashes)) >= num_kept, "verified blocks at the head can be found again"
        assert self.table.release(transfer) == 0, "released twice"
        if was_open:
            try:
                self.table.find(transfer.transfer_id, 1)
            except UnknownTransfer:
                return
            raise AssertionError("a released transfer is still on record")

    @invariant()
    def accounts_add_up(self) -> None:
        self.pool.check_integrity()
        is_open = self.table.open_transfers()
        assert self.pool.num_reserved == sum(transfer.num_missing_blocks for transfer in is_open)
        held = {b for t in is_open for b in t.block_ids} | {b for table in self.owned for b in table.block_ids}
        assert self.pool.num_in_use == len(held)

    def teardown(self) -> None:
        for transfer in self.table.open_transfers():
            self.table.release(transfer)
        for table in self.owned:
            self.pool.free(table.block_ids)
        assert self.pool.num_in_use == 0
        assert self.pool.num_reserved == 0


TestTransferTable = TransferMachine.TestCase
TestTransferTable.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_late_frame_of_an_old_generation_is_refused() -> None:
    table = TransferTable(BlockPool(NUM_BLOCKS), BLOCK_SIZE)
    transfer_id = TransferId(bytes(16))
    table.release(table.reserve(transfer_id, 1, 8, [], 0.0))
    table.reserve(transfer_id, 2, 8, [], 0.0)
    with pytest.raises(StaleGeneration, match="generation 1 came, 2 is current"):
        table.find(transfer_id, 1)


@pytest.mark.parametrize("num_tokens", [NUM_BLOCKS * BLOCK_SIZE - 1, NUM_BLOCKS * BLOCK_SIZE])
def test_the_longest_prompt_is_the_pool_s_without_one_token(num_tokens: int) -> None:
    """What the pool holds is what the worker promises as its model's length: one output token included."""
    table = TransferTable(BlockPool(NUM_BLOCKS), BLOCK_SIZE)
    if num_tokens < NUM_BLOCKS * BLOCK_SIZE:
        table.release(table.reserve(TransferId(bytes(16)), 1, num_tokens, [], 0.0))
        return
    with pytest.raises(BadRequest, match="needs 13 KV blocks; this worker has 12"):
        table.reserve(TransferId(bytes(16)), 1, num_tokens, [], 0.0)


def test_newcomers_leave_the_blocks_that_a_preempted_sequence_waits_for() -> None:
    table = TransferTable(BlockPool(NUM_BLOCKS), BLOCK_SIZE)
    with pytest.raises(NoRoom, match="4 KV blocks wanted, 3 available of 12"):
        table.reserve(TransferId(bytes(16)), 1, 12, [], 0.0, kept_blocks=9)
    table.release(table.reserve(TransferId(bytes(16)), 1, 12, [], 0.0, kept_blocks=8))


def test_what_the_table_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many transfers are opened, and however many are released that never came."""
    monkeypatch.setattr("decode_svc.transfer.MAX_TRANSFERS", 3)
    table = TransferTable(BlockPool(NUM_BLOCKS), BLOCK_SIZE)
    ids = [TransferId(bytes([number]) * 16) for number in range(10)]
    opened = [table.reserve(transfer_id, 1, 1, [], 0.0) for transfer_id in ids[:3]]
    with pytest.raises(NoRoom, match="3 transfers are open") as refused:
        table.reserve(ids[3], 1, 1, [], 0.0)
    assert refused.value.retry_after_s
    for transfer in opened:
        table.release(transfer)
    for transfer_id in ids:
        table.note_released(transfer_id, 1)
    assert len(table._released) == 3
    with pytest.raises(TransferError, match="released"):
        table.reserve(ids[-1], 1, 1, [], 0.0)
    table.release(table.reserve(ids[-1], 2, 1, [], 0.0))


def test_every_state_has_its_transitions_and_the_last_has_none() -> None:
    assert set(LEGAL_TRANSITIONS) == set(TransferState)
    assert LEGAL_TRANSITIONS[TransferState.ENDED] == frozenset()
