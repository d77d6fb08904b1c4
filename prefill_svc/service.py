"""The prefill role's parts, put together for `common.worker`."""

import asyncio
from collections.abc import Collection
from typing import Any

from common.ids import BlockHash
from common.kv.block_pool import BlockPool, IndexChanges
from common.kv.quantizing import BlockSource, narrower_sources
from common.model.assembly import LoadedModel
from common.pb import prefill_pb2_grpc, worker_pb2
from common.worker import WorkerParts, engine_status
from prefill_svc.config import PrefillSettings
from prefill_svc.engine import PrefillEngine
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.servicer import PrefillLimits, PrefillServicer


class PrefillService:
    service_name = "twostroke.v1.Prefill"

    def __init__(self, settings: PrefillSettings, parts: WorkerParts) -> None:
        model = parts.model
        scheduler = PrefillScheduler(
            BlockPool(model.num_blocks),
            model.layout.block_size,
            settings.max_num_batched_tokens,
            settings.max_waiting,
            settings.last_chunk_tokens,
        )
        self._engine = PrefillEngine(model.runner, scheduler)
        self._servicer = PrefillServicer(
            self._engine,
            parts.wake_engine,
            PrefillLimits(model.fingerprint, _sources(model), model.config.vocab_size, model.max_model_len),
            parts.telemetry,
            parts.connector,
        )

    def step(self) -> bool:
        return self._engine.step()

    def add_to_server(self, server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)

    def status(self) -> worker_pb2.WorkerStatus:
        status = engine_status(self._engine.load(), self._engine.totals)
        status.is_draining = self._servicer.is_draining
        status.kv_bytes_moved = self._servicer.kv_bytes_pushed
        status.num_refetched_blocks = self._servicer.num_refetched_blocks
        return status

    async def release(self, transfer_id: bytes, generation: int) -> int:
        return await self._servicer.release(transfer_id, generation)

    async def drain(self) -> None:
        await self._servicer.drain()

    async def run_background(self) -> None:
        await asyncio.get_running_loop().create_future()

    def take_index_changes(self) -> IndexChanges:
        return self._engine.take_index_changes()

    def count_held(self, hashes: list[BlockHash]) -> int:
        return self._engine.count_held(hashes)

    def held_hashes(self) -> Collection[BlockHash]:
        return self._engine.held_hashes()


def _sources(model: LoadedModel) -> dict[bytes, BlockSource]:
    cache = model.runner.cache
    narrower = {model.narrower_fingerprints[name]: source for name, source in narrower_sources(cache).items()}
    return {model.fingerprint: cache, **narrower}
