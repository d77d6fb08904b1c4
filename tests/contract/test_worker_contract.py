"""What the gateway relies on in prefill and decode services; the fakes that stand for them keep it too."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from common.errors import FingerprintMismatch, StaleGeneration, TransferError, TwostrokeError
from common.ids import mint_transfer_id
from common.kv.block_hash import block_hashes, root_hash
from common.kv.layout import KVLayout
from common.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from common.rpc.channel import open_channel
from common.rpc.convert import layout_to_pb, sampling_to_pb
from common.rpc.status import rpc_error_to_exception
from common.sampling import SamplingParams
from tests.support import fake_worker, fake_workers, worker_pair
from tests.support.fake_runner import fake_layout

PROMPT = tuple(range(1, 19))
SALT = b"s" * 32
Release = Callable[[bytes, int], Awaitable[int]]


@dataclass
class Services:
    """A prefill and a decode service, and one transfer between them."""

    prefill: prefill_pb2_grpc.PrefillStub
    decode: decode_pb2_grpc.DecodeStub
    decode_address: str
    fingerprint: bytes
    layout: KVLayout
    release_prefill: Release
    release_decode: Release

    def __post_init__(self) -> None:
        self.transfer_id = mint_transfer_id()

    async def reserve(self, generation: int = 1, fingerprint: bytes | None = None) -> decode_pb2.Ticket:
        root = root_hash(self.fingerprint, SALT)
        request = decode_pb2.ReserveRequest(
            request_id="r",
            transfer_id=self.transfer_id,
            generation=generation,
            fingerprint=fingerprint or self.fingerprint,
            layout=layout_to_pb(self.layout),
            num_prompt_tokens=len(PROMPT),
            block_hashes=block_hashes(root, PROMPT, self.layout.block_size),
        )
        return await self.decode.Reserve(request)

    def run(self, ticket: decode_pb2.Ticket, max_tokens: int = 6, generation: int = 1) -> Any:
        return self.prefill.Run(
            prefill_pb2.PrefillRequest(
                request_id="r",
                transfer_id=self.transfer_id,
                generation=generation,
                fingerprint=self.fingerprint,
                token_ids=PROMPT,
                sampling=sampling(max_tokens),
                tenant_salt=SALT,
                decode_address=self.decode_address,
                ticket=ticket.ticket,
                num_held_blocks=ticket.num_held_blocks,
            )
        )

    def generate(
        self, ticket: decode_pb2.Ticket | None, delivered: list[int] | None = None, generation: int = 1
    ) -> Any:
        return self.decode.Generate(
            decode_pb2.GenerateRequest(
                request_id="r",
                transfer_id=self.transfer_id,
                generation=generation,
                fingerprint=self.fingerprint,
                token_ids=PROMPT,
                output_token_ids=delivered or [],
                sampling=sampling(6),
                tenant_salt=SALT,
                ticket=ticket.ticket if ticket else b"",
            )
        )


def sampling(max_tokens: int) -> Any:
    return sampling_to_pb(SamplingParams(seed=5, max_tokens=max_tokens, temperature=0.0))


@asynccontextmanager
async def real() -> AsyncIterator[Services]:
    async with worker_pair.worker_pair() as pair:
        yield Services(
            pair.prefill,
            pair.decode,
            pair.decode_address,
            worker_pair.FINGERPRINT,
            fake_layout(worker_pair.BLOCK_SIZE),
            pair.prefill_servicer.release,
            pair.decode_servicer.release,
        )


@asynccontextmanager
async def fake() -> AsyncIterator[Services]:
    prefill, decode = fake_workers.FakePrefill("p"), fake_workers.FakeDecode("d")
    await prefill.start()
    await decode.start()
    try:
        async with open_channel(prefill.address) as to_prefill, open_channel(decode.address) as to_decode:
            yield Services(
                prefill_pb2_grpc.PrefillStub(to_prefill),
                decode_pb2_grpc.DecodeStub(to_decode),
                decode.address,
                fake_worker.FINGERPRINT,
                fake_worker.LAYOUT,
                prefill.release,
                decode.release,
            )
    finally:
        await prefill.stop()
        await decode.stop()
    prefill.check_integrity()
    decode.check_integrity()


@pytest.fixture(params=[real, fake], ids=["real", "fake"])
def make_services(request: pytest.FixtureRequest) -> Callable[[], AbstractAsyncContextManager[Services]]:
    return request.param


MakeServices = Callable[[], AbstractAsyncContextManager[Services]]


async def tokens_of(call: Any) -> list[int]:
    """Token ids; the last event, and it alone, has the finish reason."""
    events = [event async for event in call]
    assert [bool(event.finish_reason) for event in events] == [False] * (len(events) - 1) + [True]
    return [token.token_id for event in events for token in event.tokens]


async def error_of(awaitable: Awaitable[object]) -> TwostrokeError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return rpc_error_to_exception(caught.value, "peer")


async def test_first_token_then_hand_off_then_the_rest(make_services: MakeServices) -> None:
    async with make_services() as services:
        alone = await tokens_of(services.generate(None))
        services.transfer_id = mint_transfer_id()
        ticket = await services.reserve()
        decoding = services.generate(ticket)
        first, handed_off = [event async for event in services.run(ticket)]
        assert first.WhichOneof("event") == "first_token"
        assert not first.first_token.finish_reason
        assert handed_off.WhichOneof("event") == "handed_off"
        rest = await tokens_of(decoding)
        assert [first.first_token.token.token_id, *rest] == alone
        assert len(alone) == 6


async def test_a_first_token_that_ends_the_request_is_the_last_event(make_services: MakeServices) -> None:
    async with make_services() as services:
        ticket = await services.reserve()
        decoding = services.generate(ticket)
        [event] = [event async for event in services.run(ticket, max_tokens=1)]
        assert event.first_token.finish_reason
        decoding.cancel()
        await services.release_decode(services.transfer_id, 1)


async def test_decode_goes_on_after_delivered_tokens(make_services: MakeServices) -> None:
    async with make_services() as services:
        whole = await tokens_of(services.generate(None))
        for num_delivered in (1, 3, 5):
            services.transfer_id = mint_transfer_id()
            assert await tokens_of(services.generate(None, whole[:num_delivered])) == whole[num_delivered:]


async def test_one_reservation_at_a_time(make_services: MakeServices) -> None:
    async with make_services() as services:
        await services.reserve()
        assert isinstance(await error_of(services.reserve()), StaleGeneration)
        await services.release_decode(services.transfer_id, 1)
        await services.reserve(generation=2)
        await services.release_decode(services.transfer_id, 2)


async def test_a_release_ends_what_waits_and_can_be_repeated(make_services: MakeServices) -> None:
    async with make_services() as services:
        ticket = await services.reserve()
        decoding = services.generate(ticket)
        assert await services.release_prefill(services.transfer_id, 1) == 0
        await services.release_decode(services.transfer_id, 1)
        assert isinstance(await error_of(tokens_of(decoding)), TransferError)
        assert await services.release_decode(services.transfer_id, 1) == 0


async def test_a_release_leaves_newer_generations_alone(make_services: MakeServices) -> None:
    async with make_services() as services:
        ticket = await services.reserve(generation=2)
        await services.release_decode(services.transfer_id, 1)
        decoding = services.generate(ticket, generation=2)
        first, _ = [event async for event in services.run(ticket, generation=2)]
        assert first.first_token.token.token_id >= 0
        assert len(await tokens_of(decoding)) == 5


async def test_another_model_is_refused(make_services: MakeServices) -> None:
    async with make_services() as services:
        assert isinstance(await error_of(services.reserve(fingerprint=b"x" * 32)), FingerprintMismatch)
