"""Helpers share a job's parts with its caller, never hold it up before they have begun, and hand on what went wrong."""

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from kernels.cpu.pool import HelperPool


def drain(parts: Iterator[int], num_parts: int, done: list[int]) -> None:
    for part in parts:
        if part >= num_parts:
            return
        done.append(part)


def test_every_part_is_done_once() -> None:
    pool = HelperPool()
    for num_parts in (0, 1, 2, 50, 1000):
        parts, done = count(), []
        pool.run(lambda parts=parts, done=done, n=num_parts: drain(parts, n, done), 4)
        assert sorted(done) == list(range(num_parts))


def test_a_caller_waits_for_a_helper_at_work() -> None:
    """The helper enters first, and ends after the caller has run out of parts."""
    pool = HelperPool()
    helper_entered, caller_done = threading.Event(), threading.Event()
    done: list[str] = []
    caller = threading.current_thread()

    def job() -> None:
        if threading.current_thread() is caller:
            assert helper_entered.wait(10)
            done.append("caller")
            caller_done.set()
        else:
            helper_entered.set()
            assert caller_done.wait(10)
            done.append("helper")

    pool.run(job, 2)
    assert done == ["caller", "helper"]


def test_a_caller_does_not_wait_for_helpers_that_are_busy_elsewhere() -> None:
    pool = HelperPool()
    helper_entered, let_go = threading.Event(), threading.Event()

    def outer() -> None:
        outer_caller = threading.current_thread()

        def long_job() -> None:
            if threading.current_thread() is outer_caller:
                assert helper_entered.wait(10)
            else:
                helper_entered.set()
                assert let_go.wait(10)

        pool.run(long_job, 2)

    other = threading.Thread(target=outer)
    other.start()
    assert helper_entered.wait(10)
    done: list[int] = []
    pool.run(lambda: done.append(1), 2)  # the only helper is inside the other job
    assert done == [1]
    let_go.set()
    other.join(10)
    assert not other.is_alive()


def test_a_helper_out_of_memory_is_the_callers_error() -> None:
    pool = HelperPool()
    helper_done = threading.Event()
    caller = threading.current_thread()

    def job() -> None:
        if threading.current_thread() is caller:
            assert helper_done.wait(10)
            return
        helper_done.set()
        raise MemoryError("no room for a worker's scratch")

    with pytest.raises(MemoryError, match="scratch"):
        pool.run(job, 2)
    done: list[int] = []
    pool.run(lambda: drain(iter([0]), 1, done), 1)
    assert done == [0]


def test_the_callers_own_error_is_raised() -> None:
    def job() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        HelperPool().run(job, 1)
