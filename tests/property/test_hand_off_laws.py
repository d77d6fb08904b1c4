"""The hand-off under attack, with virtual time: any order of requests, steps, faults, departures, deaths and waits.

What is driven are the real services. The laws: what a client has received is right at every moment; everything that
is open comes to an end; nobody holds a block, a promise, a call or a claim afterwards.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from common.errors import NoRoom
from common.faults.points import KINDS_AT, FaultKind, Point
from gateway.placement import Role
from tests.support.simulated_stack import LEASE_S, PROGRESS_TIMEOUT_S, Client, SimulatedStack

NAMES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
TEXTS = [tuple(range(40)), tuple(range(40, 0, -1))]  # prompts are beginnings of these: prefixes are shared
REST_S = 8 * PROGRESS_TIMEOUT_S + 2 * LEASE_S
"""Three attempts, each with a reservation and a leg that may stall, and a lost decode worker that is waited for."""

names = st.sampled_from(NAMES)
prompts = st.builds(
    lambda text, length, last: (*text[:length], last), *map(st.sampled_from, (TEXTS, (0, 3, 7, 8, 17, 30), (41, 42)))
)
FAULTS = [(point, kind) for point in Point for kind in sorted(KINDS_AT[point]) if kind is not FaultKind.KILL]
faults = st.sampled_from(FAULTS)


class HandOffMachine(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.stack = SimulatedStack(num_blocks={Role.PREFILL: 20, Role.DECODE: 20})

    @rule(target=clients, prompt=prompts, max_tokens=st.sampled_from((1, 2, 5, 14)))
    def ask(self, prompt: tuple[int, ...], max_tokens: int) -> Client:
        return self.stack.ask(prompt, max_tokens)

    @rule(name=names)
    def step(self, name: str) -> None:
        self.stack.step(name)

    @rule(count=st.integers(1, 6))
    def everyone_steps(self, count: int) -> None:
        for _ in range(count):
            self.stack.step_everyone()

    @rule(client=clients)
    def client_leaves(self, client: Client) -> None:
        self.stack.leave(client)

    @rule(name=names, client=clients)
    def client_leaves_during_a_step(self, name: str, client: Client) -> None:
        self.stack.step(name, lambda: self.stack.leave(client))

    @rule(name=names)
    def die(self, name: str) -> None:
        self.stack.die(name)

    @rule(name=names, victim=names)
    def another_dies_during_a_step(self, name: str, victim: str) -> None:
        if name != victim:
            self.stack.step(name, lambda: self.stack.die(victim))

    @rule(name=names)
    def come_back(self, name: str) -> None:
        self.stack.start_worker(name)

    @rule(fault=faults)
    def next_message_suffers(self, fault: tuple[Point, FaultKind]) -> None:
        self.stack.faults.next_at[fault[0]].append(fault[1])

    @rule(seconds=st.sampled_from((0.05, 0.3, 1.0, 2.5, PROGRESS_TIMEOUT_S, LEASE_S)))
    def time_passes(self, seconds: float) -> None:
        self.stack.loop.advance(seconds)

    @invariant()
    def what_came_is_right(self) -> None:
        self.stack.check()

    def teardown(self) -> None:
        try:
            self.stack.rest(REST_S)
            self.stack.check_baseline()
        finally:
            self.stack.close()


@pytest.mark.parametrize(
    "point",
    [Point.FRAME_SENT, Point.FRAME_RECEIVED, Point.COMMIT, Point.ACK, Point.PREFILL_REPLY, Point.DECODE_STREAM],
)
def test_a_stall_is_noticed_while_others_are_served(point: Point) -> None:
    """Time without progress is the request's own: a worker that is busy with others does not hide it."""
    stack = SimulatedStack(num_blocks={Role.PREFILL: 20, Role.DECODE: 20})
    try:
        stack.faults.next_at[point].append(FaultKind.STALL)
        stalled = stack.ask(TEXTS[0][:30], 14)
        stack.work()
        for number in range(3 * int(PROGRESS_TIMEOUT_S)):
            other = stack.ask((number, number), 3)
            stack.work()
            assert other.has_ended
            stack.loop.advance(1.0)
        assert stalled.has_ended
        assert stalled.received == stalled.expected
        stack.rest(LEASE_S)
        stack.check_baseline()
    finally:
        stack.close()


@pytest.mark.parametrize(("point", "kind"), FAULTS)
def test_with_one_worker_of_each_kind_the_answer_survives_two_faults(point: Point, kind: FaultKind) -> None:
    """Both workers are well: that there is no other is no reason to fail."""
    stack = SimulatedStack(num_blocks={Role.PREFILL: 20, Role.DECODE: 20}, num_workers=1)
    try:
        stack.faults.next_at[point].extend((kind, kind))
        client = stack.ask(TEXTS[0][:30], 14)
        for _ in range(int(REST_S)):
            stack.work()
            stack.loop.advance(1.0)
        assert client.error is None
        assert client.received == client.expected
        stack.rest(LEASE_S)
        stack.check_baseline()
    finally:
        stack.close()


def test_a_long_wait_in_a_queue_is_no_loss() -> None:
    """Longer than the time-out for silence, by far: the queue moves, and the workers say so."""
    stack = SimulatedStack(num_blocks={Role.PREFILL: 20, Role.DECODE: 200})
    try:
        clients = [stack.ask(((number,) * 30), 3) for number in range(12)]
        waited_s = 0.0
        while not all(client.has_ended for client in clients):
            stack.step_everyone()
            stack.loop.advance(1.0)
            waited_s += 1.0
        assert waited_s > 3 * PROGRESS_TIMEOUT_S
        assert [client.route.fallback for client in clients] == [""] * 12
        stack.rest(LEASE_S)
        stack.check_baseline()
    finally:
        stack.close()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_prefill_worker_that_dies_frees_its_reservation_in_under_a_second(num_workers: int, num_steps: int) -> None:
    """Whether another takes over, which makes a reservation of its own, or decode computes the prompt."""
    stack = SimulatedStack(num_blocks={Role.PREFILL: 20, Role.DECODE: 20}, num_workers=num_workers)
    try:
        client = stack.ask(TEXTS[0][:30], 14)
        for _ in range(num_steps):
            stack.step("prefill-0")
        stack.die("prefill-0")
        stack.loop.advance(0.9)
        decode = [worker.service for name, worker in stack.workers.items() if name.startswith(Role.DECODE)]
        assert sum(service._receiver.num_open for service in decode) == num_workers - 1
        stack.work()
        stack.loop.advance(0.9)
        stack.work()
        assert client.error is None
        assert client.received == client.expected
        stack.rest(LEASE_S)
        stack.check_baseline()
    finally:
        stack.close()


def test_overload_is_answered_by_refusals_and_by_no_time_out() -> None:
    """Sixty prompts at once, for which there is room for two at a time."""
    stack = SimulatedStack(num_blocks={Role.PREFILL: 20, Role.DECODE: 20}, num_workers=1)
    try:
        clients = [stack.ask((number, *TEXTS[0][:30]), 14) for number in range(60)]
        waited_s = 0.0
        while not all(client.has_ended for client in clients):
            stack.work()
            stack.loop.advance(0.1)
            waited_s += 0.1
        assert waited_s < PROGRESS_TIMEOUT_S
        errors = [client.error for client in clients if client.error is not None]
        assert 0 < len(errors) < len(clients)
        assert all(isinstance(error, NoRoom) and error.retry_after_s for error in errors)
        stack.rest(LEASE_S)
        stack.check_baseline()
    finally:
        stack.close()


TestHandOff = HandOffMachine.TestCase
TestHandOff.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
