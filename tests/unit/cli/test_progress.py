import io
import threading

from cli.progress import Progress


class Announcing(io.StringIO):
    """Sets `written` at each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.set()
        return length


def test_each_step_is_a_line_with_the_seconds_since_the_beginning() -> None:
    times = iter([100.0, 100.25, 163.0])
    out = io.StringIO()
    progress = Progress(out, clock=lambda: next(times))
    progress.step("starting")
    progress.step("ready")
    assert out.getvalue() == "[   0.2 s] starting\n[  63.0 s] ready\n"


def test_a_reminder_speaks_while_the_work_goes_on_and_then_no_more() -> None:
    out = Announcing()
    with Progress(out).reminder("still at it", every_s=0.001):
        assert out.written.wait(timeout=60)
    assert {line.split("] ")[1] for line in out.getvalue().splitlines()} == {"still at it"}
    assert not any(thread.name == "progress" for thread in threading.enumerate())
