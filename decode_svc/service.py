"""The decode role's parts, put together for `common.worker`."""

import asyncio
from collections.abc import Collection
from typing import Any

from common.ids import BlockHash
from common.kv.block_pool import BlockPool, IndexChanges
from common.pb import worker_pb2
from common.rpc.push import add_decode_servicer
from common.worker import WorkerParts, engine_status
from decode_svc.config import DecodeSettings
from decode_svc.engine import DecodeEngine, SpeculationSettings
from decode_svc.kv_receiver import KVReceiver
from decode_svc.scheduler import DecodeScheduler, SchedulerLimits
from decode_svc.servicer import DecodeLimits, DecodeServicer
from decode_svc.speculation.prompt_lookup import PromptLookup
from decode_svc.speculation.proposer import NoProposer
from decode_svc.transfer import TransferTable


class DecodeService:
    service_name = "twostroke.v1.Decode"

    def __init__(self, settings: DecodeSettings, parts: WorkerParts) -> None:
        model = parts.model
        pool = BlockPool(model.num_blocks)
        scheduler = DecodeScheduler(
            pool,
            SchedulerLimits(
                block_size=model.layout.block_size,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_sequences=settings.max_num_sequences,
                max_waiting=settings.max_waiting,
                preemption_shield_tokens=settings.preemption_shield_tokens,
            ),
        )
        self._engine = DecodeEngine(
            model.runner,
            scheduler,
            PromptLookup() if settings.speculation else NoProposer(),
            SpeculationSettings(settings.num_draft_tokens, settings.speculation_max_batch),
        )
        self._receiver = KVReceiver(
            self._engine, TransferTable(pool, model.layout.block_size), model.runner.cache, settings.lease_s
        )
        self._servicer = DecodeServicer(
            self._engine,
            parts.wake_engine,
            self._receiver,
            DecodeLimits(model.fingerprint, model.layout, model.config.vocab_size, model.max_model_len),
            parts.telemetry,
        )
        self._lease_s = settings.lease_s

    def step(self) -> bool:
        return self._engine.step()

    def add_to_server(self, server: Any) -> None:
        add_decode_servicer(self._servicer, server)

    def status(self) -> worker_pb2.WorkerStatus:
        totals = self._engine.totals
        status = engine_status(self._engine.load(), totals)
        status.is_draining = self._servicer.is_draining
        status.kv_bytes_moved = self._receiver.kv_bytes_received
        status.num_refetched_blocks = self._receiver.num_refetched_blocks
        status.num_preemptions = totals.num_preemptions
        status.num_draft_tokens = totals.num_draft_tokens
        status.num_accepted_tokens = totals.num_accepted_tokens
        return status

    async def release(self, transfer_id: bytes, generation: int) -> int:
        return await self._servicer.release(transfer_id, generation)

    async def drain(self) -> None:
        await self._servicer.drain()

    async def run_background(self) -> None:
        """Ends reservations that nobody uses."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            self._receiver.expire()

    def take_index_changes(self) -> IndexChanges:
        return self._engine.take_index_changes()

    def count_held(self, hashes: list[BlockHash]) -> int:
        return self._engine.count_held(hashes)

    def held_hashes(self) -> Collection[BlockHash]:
        return self._engine.held_hashes()
