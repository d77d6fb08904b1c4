"""The memory high-water mark, as the system tells it."""

from common.process_memory import parse_peak, peak_memory_bytes


def test_the_peak_is_read_from_the_status() -> None:
    assert parse_peak("Name:\tpython\nVmPeak:\t  9000 kB\nVmHWM:\t  1234 kB\nVmRSS:\t  1000 kB\n") == 1234 * 1024
    assert parse_peak("Name:\tpython\n") == 0


def test_the_peak_stays_when_the_memory_is_given_back() -> None:
    before = peak_memory_bytes()
    block = bytearray(before)
    block[::4096] = b"x" * len(block[::4096])
    del block
    assert peak_memory_bytes() - before > before // 2
