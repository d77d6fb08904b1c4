"""A worker that takes connections and never answers, or whose packets vanish: one try ends within the connect time.

The connect time is made short here, and a call's deadline long: which of the two ended the call is what is asserted.
Without a connect time keepalive would end the try, after 4 to 6 seconds, which is later than the deadline.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import grpc
import pytest

from common.errors import PeerLost
from common.ids import mint_transfer_id
from common.pb import prefill_pb2, worker_pb2, worker_pb2_grpc
from common.rpc.channel import open_channel
from common.rpc.limits import CLIENT_OPTIONS, CONNECT_TIMEOUT_MS
from common.rpc.status import rpc_error_to_exception
from common.sampling import SamplingParams
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.gateway_stack import GatewayStack, make_generation, running, wanted
from tests.support.silent_worker import accepts_and_says_nothing, black_hole
from tests.support.worker_pair import error_of, worker_pair

CONNECT_TIME_OPTION = "grpc.min_reconnect_backoff_ms"
SHORT_MS = 100
DEADLINE_S = 3.5

Silence = Callable[[], AbstractContextManager[str]]
silences = pytest.mark.parametrize("silence", [accepts_and_says_nothing, black_hole])


@pytest.fixture(autouse=True)
def short_connect_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [(name, SHORT_MS if name == CONNECT_TIME_OPTION else value) for name, value in CLIENT_OPTIONS]
    monkeypatch.setattr("common.rpc.channel.CLIENT_OPTIONS", tuple(options))


def test_the_connect_time_is_the_design_s() -> None:
    assert dict(CLIENT_OPTIONS)[CONNECT_TIME_OPTION] == CONNECT_TIMEOUT_MS == 2_000


@silences
async def test_a_call_ends_with_the_connect_time_and_the_peer_is_lost(silence: Silence) -> None:
    with silence() as address:
        async with open_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=DEADLINE_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert type(rpc_error_to_exception(caught.value, "decode-0")) is PeerLost


@silences
async def test_prefill_gives_up_a_hand_off_to_it_and_frees_its_blocks(silence: Silence) -> None:
    with silence() as address:
        async with worker_pair() as pair:
            prompt, transfer_id = tuple(range(30)), mint_transfer_id()
            ticket = await pair.reserve(prompt, transfer_id)
            pair.decode_address = address
            async with asyncio.timeout(DEADLINE_S):
                error = await error_of(pair.run_prefill(prompt, SamplingParams(), transfer_id, ticket))
            assert type(error) is PeerLost
            assert address in error.message
            pair.receiver.release(transfer_id, 1)


@silences
async def test_the_client_s_stream_goes_on_at_another_worker(silence: Silence) -> None:
    with silence() as address:

        class PrefillThatCannotReach(FakePrefill):
            async def _commit(self, request: prefill_pb2.PrefillRequest, token: int) -> None:
                if request.decode_address == stack.decode[0].address:
                    request.decode_address = address
                await super()._commit(request, token)

        stack = GatewayStack([PrefillThatCannotReach("p0")], [FakeDecode("d0"), FakeDecode("d1")])
        async with running(stack):
            async with asyncio.timeout(DEADLINE_S):
                outcome = await stack.run(make_generation())
            assert outcome.token_ids == wanted(make_generation())
            assert (outcome.route.decode_worker, outcome.route.fallback) == ("d1", "decode_lost")
