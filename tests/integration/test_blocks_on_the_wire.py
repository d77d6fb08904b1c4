"""Blocks sent equal blocks received, byte for byte, over real gRPC between two pools."""

import pytest

from common.kv.block_hash import block_hashes, root_hash
from common.sampling import SamplingParams
from tests.support.worker_pair import BLOCK_SIZE, FINGERPRINT, SALT, worker_pair


@pytest.mark.parametrize("length", [3, 16, 61])
async def test_every_full_block_has_the_sender_s_bytes(length: int) -> None:
    prompt = tuple(range(1, length + 1)) if length < 50 else tuple(n % 49 + 1 for n in range(length))
    hashes = block_hashes(root_hash(FINGERPRINT, SALT), prompt, BLOCK_SIZE)
    async with worker_pair() as pair:
        await pair.answer(prompt, SamplingParams(max_tokens=4, temperature=0.0))
        sent = pair.prefill_pool.lookup(hashes)
        received = pair.decode_engine.scheduler.pool.lookup(hashes)
        assert len(sent) == len(received) == length // BLOCK_SIZE
        for ours, theirs in zip(sent, received, strict=True):
            source = pair.prefill_engine._runner.cache.read_blocks([ours], BLOCK_SIZE)
            assert pair.decode_runner.cache.read_blocks([theirs], BLOCK_SIZE) == source
            assert any(source), "an empty block would show nothing"
