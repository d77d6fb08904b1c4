"""How much memory this process has had resident at most."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """Since this program started; 0 where the system does not tell (it is not Linux).

    Not `getrusage`: its maximum outlives exec, so that a worker would report what its parent had when it was started.
    """
    return parse_peak(_STATUS.read_text()) if _STATUS.exists() else 0


def parse_peak(status: str) -> int:
    """Bytes of the line `VmHWM: 1234 kB`; 0 without one."""
    lines = (line.split() for line in status.splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == "VmHWM:"), 0)
