"""What the console script does with its arguments: help, usage errors, and failures in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli import __main__ as command_line
from cli.child import last_lines
from cli.config import service_environment
from cli.errors import CommandError, ServiceDied
from cli.options import NUMERICS, StackOptions
from cli.ports import held_ports
from cli.topology import Topology
from common.errors import ConfigError, ModelLoadError
from common.model.linear import Numerics

HEAVY = ("torch", "transformers", "grpc", "httpx", "opentelemetry", "pydantic")


def parse(*argv: str) -> StackOptions:
    return StackOptions.of(command_line._parser(argv).parse_args(argv))


def fail_with(error: Exception) -> int:
    def action() -> int:
        raise error

    return command_line.exit_code(action)


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from cli.__main__ import main\n"
        "try: main(['--help'])\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(f"    {command} " in result.stdout for command in command_line.COMMANDS)
    assert result.stdout.endswith("[]\n")


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: twostroke {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["up", "--topology", "1p0d"],
        ["up", "--port", "0"],
        ["up", "--port", "65536"],
        ["up", "--port", "http"],
        ["up", "--kv-memory-mib", "-1"],
        ["up", "--kv-memory-mib", "many"],
        ["up", "--numerics", "int4"],
        ["up", "--grace-s", "nan"],
        ["up", "--start-timeout-s", "inf"],
        ["demo", "--no-such-flag"],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(argv)
    assert caught.value.code == 2
    assert "usage: twostroke" in capsys.readouterr().err


def test_a_bad_topology_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["up", "--topology", "0p1d"])
    assert "'0p1d' has no prefill service; for decode alone use colocated" in capsys.readouterr().err


def test_a_stack_without_flags_is_1p1d_on_port_8000_of_this_machine_only() -> None:
    options = parse("up")
    assert (options.topology, options.host, options.port) == (Topology(1, 1), "127.0.0.1", 8000)
    assert (options.model, options.kv_memory_mib, options.speculation, options.redis_url) == (
        "SmolLM2-135M-Instruct",
        None,
        True,
        "",
    )


def test_flags_reach_the_options() -> None:
    options = parse("demo", "--topology", "2p3d", "--kv-memory-mib", "64", "--no-speculation", "--grace-s", "0.5")
    assert (options.topology, options.kv_memory_mib) == (Topology(2, 3), 64)
    assert (options.speculation, options.grace_s) == (False, 0.5)


@pytest.mark.parametrize("command", ["up", "run", "demo"])
def test_every_numeric_path_may_be_chosen_and_the_default_is_the_workers_own(command: str) -> None:
    assert [parse(command, "--numerics", numerics).numerics for numerics in Numerics] == list(Numerics)
    assert tuple(Numerics) == NUMERICS
    assert parse(command).numerics is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("port 8000 is in use"), 1),
        (ModelLoadError("no such file"), 1),
        (ConfigError("unknown setting"), 2),
        (KeyboardInterrupt(), 1),
    ],
)
def test_failures_are_one_line_on_stderr(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail_with(error) == code
    assert capsys.readouterr().err == f"twostroke: {error}\n" if str(error) else "twostroke: interrupted\n"


def test_what_we_did_not_foresee_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        fail_with(ZeroDivisionError())


def test_a_death_is_named_by_code_or_signal_with_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    log.write_bytes(b"first\n" + b"".join(b"line %d\n" % number for number in range(20)) + b"\xff last")
    lines = last_lines(log)
    assert (len(lines), lines[0], lines[-1]) == (20, "line 1", "\N{REPLACEMENT CHARACTER} last")
    message = str(ServiceDied("decode-0", 3, str(log), ["one", "two"]))
    assert message == f"decode-0 exited with code 3; its log {log} ends with:\n  one\n  two"
    assert "was killed by signal 9" in str(ServiceDied("decode-0", -9, str(log), []))
    assert str(ServiceDied("decode-0", 1, str(log), [])).endswith("is empty")


def test_services_get_thread_settings_that_the_user_did_not_choose() -> None:
    environment = service_environment({"GOMP_SPINCOUNT": "7", "PATH": "/bin"})
    assert (environment["GOMP_SPINCOUNT"], environment["PATH"]) == ("7", "/bin")
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert service_environment({})["GOMP_SPINCOUNT"] == "5000"


def test_a_model_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWOSTROKE_STATE_DIR", str(tmp_path))
    missing = tmp_path / "missing.gguf"
    with held_ports() as ports:
        assert command_line.main(["up", "--port", str(next(ports)), "--model", str(missing)]) == 1
    captured = capsys.readouterr()
    assert str(missing) in captured.err
    assert "starting" not in captured.out


def test_a_state_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "state"
    in_the_way.write_text("a file where a folder should be")
    monkeypatch.setenv("TWOSTROKE_STATE_DIR", str(in_the_way))
    assert command_line.main(["up", "--port", "8000"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("twostroke: ")
    assert f"{in_the_way / 'run-8000'}" in line
