"""Settings: one value from a flag, a variable or the default; anything unknown or wrong is refused by name."""

from pathlib import Path

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from common.config import Settings, cache_dir, load_or_exit, state_dir
from common.errors import ConfigError

PREFIX = "TWOSTROKE_EXAMPLE_"


class ExampleSettings(Settings):
    program = "example"
    model_config = SettingsConfigDict(env_prefix=PREFIX)

    port: int = Field(default=50051, ge=0, le=65535)
    kv_memory_mib: int = Field(default=512, gt=0)
    peers: list[str] = Field(default_factory=list)
    speculation: bool = True
    worker_id: str | None = None


def test_defaults() -> None:
    settings = ExampleSettings.load([])
    assert (settings.port, settings.kv_memory_mib, settings.peers) == (50051, 512, [])
    assert (settings.speculation, settings.worker_id) == (True, None)


def test_a_flag_and_a_variable_are_the_same_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExampleSettings.load(["--kv-memory-mib", "64"]).kv_memory_mib == 64
    monkeypatch.setenv(f"{PREFIX}KV_MEMORY_MIB", "128")
    assert ExampleSettings.load([]).kv_memory_mib == 128


def test_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}PORT", "1")
    settings = ExampleSettings.load(["--port=2"])
    assert settings.port == 2


def test_lists_and_switches() -> None:
    settings = ExampleSettings.load(["--peers", "a:1", "--peers", "b:2", "--no-speculation", "--worker-id", "w"])
    assert (settings.peers, settings.speculation, settings.worker_id) == (["a:1", "b:2"], False, "w")
    assert ExampleSettings.load(["--speculation"]).speculation


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "70000"], "port: .*65535.*70000"),
        (["--port", "many"], "port: .*'many'"),
        (["--kv-memory-mib", "0"], "kv_memory_mib: .*greater than 0"),
        (["--port", "-1", "--kv-memory-mib", "-1"], "port: .*; kv_memory_mib: .*"),
    ],
)
def test_a_wrong_value_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ExampleSettings.load(argv)


@pytest.mark.parametrize(("name", "value", "named"), [("PORT", "many", r"port: .*'many'"), ("PEERS", "a:1", r"peers")])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, named: str) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ConfigError, match=named):
        ExampleSettings.load([])


@pytest.mark.parametrize("name", ["TYPO", "KV_MEMORY", "PORTS"])
def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(PREFIX + name, "1")
    with pytest.raises(ConfigError, match=f"unknown setting {PREFIX}{name}.*known: .*{PREFIX}PORT"):
        ExampleSettings.load([])


def test_other_services_variables_are_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_OTHER_PORT", "1")
    monkeypatch.setenv("PORT", "1")
    assert ExampleSettings.load([]).port == 50051


@pytest.mark.parametrize("argv", [["--prot", "1"], ["--kv-memory", "1"], ["stray"], ["--kv_memory_mib", "1"]])
def test_an_unknown_flag_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        ExampleSettings.load(argv)
    assert exit_info.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_settings_are_frozen() -> None:
    settings = ExampleSettings.load([])
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="prot"):
        ExampleSettings(prot=1)  # type: ignore[call-arg]


def test_help_names_every_setting_and_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        ExampleSettings.load(["--help"])
    assert exit_info.value.code in (0, None)
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("example", "--port", "--kv-memory-mib", "--no-speculation"))


def test_a_program_ends_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_or_exit(ExampleSettings, ["--port", "70000"])
    assert exit_info.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("example: port: ")
    assert load_or_exit(ExampleSettings, ["--port", "7"]).port == 7


def test_folders_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("TWOSTROKE_CACHE_DIR", "TWOSTROKE_STATE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "twostroke"
    assert state_dir() == tmp_path / ".local" / "state" / "twostroke"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg/state")
    assert (cache_dir(), state_dir()) == (Path("/xdg/cache/twostroke"), Path("/xdg/state/twostroke"))
    monkeypatch.setenv("TWOSTROKE_CACHE_DIR", "/own/cache")
    monkeypatch.setenv("TWOSTROKE_STATE_DIR", "/own/state")
    assert (cache_dir(), state_dir()) == (Path("/own/cache"), Path("/own/state"))
