"""A prefill and a decode service in this process: real gRPC on loopback, real blocks, no model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.engine_thread import EngineThread
from common.errors import TwostrokeError
from common.ids import BlockHash, TransferId, mint_transfer_id
from common.kv.block_hash import block_hashes, root_hash
from common.kv.block_pool import BlockPool
from common.kv.layout import KVFormat, KVLayout
from common.kv.quantizing import narrower_sources
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from common.rpc.channel import Connector
from common.rpc.convert import layout_to_pb, sampling_to_pb
from common.rpc.push import PushCall, add_decode_servicer, push_call
from common.rpc.server import WorkerServer
from common.rpc.status import rpc_error_to_exception
from common.rpc.tls import TlsIdentity
from common.sampling import SamplingParams
from common.telemetry.setup import make_telemetry
from decode_svc.engine import DecodeEngine, SpeculationSettings
from decode_svc.kv_receiver import KVReceiver
from decode_svc.scheduler import DecodeScheduler, SchedulerLimits
from decode_svc.servicer import DecodeLimits, DecodeServicer
from decode_svc.speculation.prompt_lookup import PromptLookup
from decode_svc.transfer import TransferTable
from prefill_svc.engine import PrefillEngine
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.servicer import PrefillLimits, PrefillServicer
from tests.support.fake_runner import FakeRunner, fake_layout

BLOCK_SIZE = 4
VOCAB = 50
FINGERPRINT = b"f" * 32
SALT = b"s" * 32
LEASE_S = 30.0


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class WorkerPair:
    prefill_engine: PrefillEngine
    prefill_pool: BlockPool
    prefill_servicer: PrefillServicer
    prefill: prefill_pb2_grpc.PrefillStub
    decode_engine: DecodeEngine
    decode_servicer: DecodeServicer
    decode: decode_pb2_grpc.DecodeStub
    push: PushCall
    decode_address: str
    decode_runner: FakeRunner
    receiver: KVReceiver
    receiver_clock: ManualClock
    decode_layout: KVLayout
    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    async def reserve(
        self, prompt: Sequence[int], transfer_id: TransferId, generation: int = 1, **changes: object
    ) -> decode_pb2.Ticket:
        request = decode_pb2.ReserveRequest(
            request_id="r",
            transfer_id=transfer_id,
            generation=generation,
            fingerprint=FINGERPRINT,
            layout=layout_to_pb(self.decode_layout),
            num_prompt_tokens=len(prompt),
            block_hashes=block_hashes(root_hash(FINGERPRINT, SALT), prompt, BLOCK_SIZE),
        )
        for name, value in changes.items():
            setattr(request, name, value)
        return await self.decode.Reserve(request)

    def run_prefill(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        transfer_id: TransferId,
        ticket: decode_pb2.Ticket | None,
        generation: int = 1,
        delivered: Sequence[int] = (),
    ) -> grpc.aio.UnaryStreamCall:
        return self.prefill.Run(
            prefill_pb2.PrefillRequest(
                request_id="r",
                transfer_id=transfer_id,
                generation=generation,
                fingerprint=FINGERPRINT,
                token_ids=prompt,
                sampling=sampling_to_pb(params),
                tenant_salt=SALT,
                decode_address=self.decode_address if ticket else "",
                ticket=ticket.ticket if ticket else b"",
                num_held_blocks=ticket.num_held_blocks if ticket else 0,
                output_token_ids=delivered,
            )
        )

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        transfer_id: TransferId,
        ticket: decode_pb2.Ticket | None,
        delivered: Sequence[int] = (),
        generation: int = 1,
    ) -> grpc.aio.UnaryStreamCall:
        return self.decode.Generate(
            decode_pb2.GenerateRequest(
                request_id="r",
                transfer_id=transfer_id,
                generation=generation,
                fingerprint=FINGERPRINT,
                token_ids=prompt,
                output_token_ids=delivered,
                sampling=sampling_to_pb(params),
                tenant_salt=SALT,
                ticket=ticket.ticket if ticket else b"",
            )
        )

    async def answer(self, prompt: Sequence[int], params: SamplingParams, delivered: Sequence[int] = ()) -> list[int]:
        """The whole way, after the tokens that were `delivered`: reserve, prefill and push, commit, decode."""
        transfer_id = mint_transfer_id()
        ticket = await self.reserve((*prompt, *delivered), transfer_id)
        decoding = self.generate(prompt, params, transfer_id, ticket, delivered)
        running = self.run_prefill(prompt, params, transfer_id, ticket, delivered=delivered)
        try:
            first = [event async for event in running]
            tokens = [first[0].first_token.token.token_id]
            if first[0].first_token.finish_reason:
                return tokens
            async for event in decoding:
                tokens.extend(token.token_id for token in event.tokens)
            return tokens
        finally:
            decoding.cancel()
            running.cancel()

    def block_hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        return block_hashes(root_hash(FINGERPRINT, SALT), tokens, BLOCK_SIZE)

    async def check_baseline(self) -> None:
        """Both sides hold nothing. Waits for the handlers of calls that were cancelled, which end a moment later."""
        async with asyncio.timeout(5):
            while self.prefill_servicer.num_active or any(self.decode_servicer.load()):
                await asyncio.sleep(0)
        self.prefill_engine.check_integrity()
        self.decode_engine.check_integrity()
        assert self.prefill_pool.num_in_use == 0
        assert self.decode_engine.scheduler.pool.num_in_use == 0
        assert self.decode_engine.scheduler.pool.num_reserved == 0


async def error_of(call: object) -> TwostrokeError:
    """What a call that must fail fails with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return rpc_error_to_exception(error, "peer")
    raise AssertionError("the call did not fail")


@asynccontextmanager
async def worker_pair(
    *,
    prefill_blocks: int = 64,
    decode_blocks: int = 64,
    prefill_budget: int = 8,
    decode_budget: int = 16,
    tls: TlsIdentity | None = None,
    decode_format: KVFormat = KVFormat.FP32,
) -> AsyncIterator[WorkerPair]:
    """Prefill's pool is unquantized; with another `decode_format` it quantizes on send."""
    spans = InMemorySpanExporter()
    telemetry = make_telemetry("test", "worker", (SimpleSpanProcessor(spans),))
    fatal: list[BaseException] = []

    prefill_runner = FakeRunner(prefill_blocks, BLOCK_SIZE, VOCAB)
    prefill_pool = BlockPool(prefill_blocks)
    prefill_engine = PrefillEngine(prefill_runner, PrefillScheduler(prefill_pool, BLOCK_SIZE, prefill_budget, 100))
    prefill_thread = EngineThread(prefill_engine.step, fatal.append, "prefill")
    sources = {KVFormat.FP32: prefill_runner.cache, **narrower_sources(prefill_runner.cache)}
    limits = PrefillLimits(FINGERPRINT, {FINGERPRINT: sources[decode_format]}, VOCAB, 200)
    connector = Connector(tls)
    prefill_servicer = PrefillServicer(prefill_engine, prefill_thread.wake, limits, telemetry, connector)

    decode_runner = FakeRunner(decode_blocks, BLOCK_SIZE, VOCAB, kv_format=decode_format)
    decode_pool = BlockPool(decode_blocks)
    scheduler = DecodeScheduler(decode_pool, SchedulerLimits(BLOCK_SIZE, decode_budget, 16, 100, 64))
    decode_engine = DecodeEngine(decode_runner, scheduler, PromptLookup(), SpeculationSettings(3, 8))
    decode_thread = EngineThread(decode_engine.step, fatal.append, "decode")
    clock = ManualClock()
    table = TransferTable(decode_pool, BLOCK_SIZE)
    receiver = KVReceiver(decode_engine, table, decode_runner.cache, LEASE_S, clock)
    decode_limits = DecodeLimits(FINGERPRINT, fake_layout(BLOCK_SIZE, decode_format), VOCAB, 200)
    decode_servicer = DecodeServicer(decode_engine, decode_thread.wake, receiver, decode_limits, telemetry)

    prefill_server, decode_server = WorkerServer("127.0.0.1:0", tls=tls), WorkerServer("127.0.0.1:0", tls=tls)
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill_servicer, prefill_server.grpc_server)
    add_decode_servicer(decode_servicer, decode_server.grpc_server)
    channels = [connector.open(prefill_server.address), connector.open(decode_server.address)]
    prefill_thread.start()
    decode_thread.start()
    await prefill_server.start()
    await decode_server.start()
    pair = WorkerPair(
        prefill_engine,
        prefill_pool,
        prefill_servicer,
        prefill_pb2_grpc.PrefillStub(channels[0]),
        decode_engine,
        decode_servicer,
        decode_pb2_grpc.DecodeStub(channels[1]),
        push_call(channels[1]),
        decode_server.address,
        decode_runner,
        receiver,
        clock,
        fake_layout(BLOCK_SIZE, decode_format),
        spans,
    )
    try:
        yield pair
        await pair.check_baseline()
    finally:
        for channel in channels:
            await channel.close()
        await prefill_servicer.close()
        await prefill_server.stop(0)
        await decode_server.stop(0)
        prefill_thread.stop()
        decode_thread.stop()
    assert not fatal, fatal
