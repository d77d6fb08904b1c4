"""When a service is started again: at once, after a growing pause, or not any more."""

from cli.restart import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILED_STARTS, STEADY_S, Restarts

KILLED = -9


def test_who_was_asked_to_end_is_started_again_at_once_however_often() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(0, 1.0) for _ in range(20)] == [0.0] * 20


def test_pauses_double_up_to_a_bound_and_deaths_while_serving_never_end_it() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(KILLED, 1.0) for _ in range(20)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_death_after_a_long_time_is_new_trouble() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.pause_s(KILLED, 1.0)
    assert restarts.pause_s(KILLED, STEADY_S) == FIRST_PAUSE_S
    assert restarts.pause_s(KILLED, 1.0) == 2 * FIRST_PAUSE_S


def test_who_never_becomes_ready_is_given_up_even_if_it_ends_well() -> None:
    for code in (0, 3, KILLED):
        restarts = Restarts()
        pauses = [restarts.pause_s(code, None) for _ in range(MAX_FAILED_STARTS)]
        assert pauses[-1] is None
        assert None not in pauses[:-1]
        assert 0.0 not in pauses[:-1], "or it would spin"


def test_one_good_start_forgives_the_bad_ones() -> None:
    restarts = Restarts()
    for _ in range(MAX_FAILED_STARTS - 1):
        restarts.pause_s(1, None)
    assert restarts.pause_s(KILLED, 1.0) is not None
    assert [restarts.pause_s(1, None) is None for _ in range(MAX_FAILED_STARTS)] == [False] * 4 + [True]
