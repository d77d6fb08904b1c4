"""Settings of the gateway, and the files that they name."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from gateway.config import GatewaySettings, read_api_keys, read_server_secret, split_address


def test_addresses_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_GATEWAY_PREFILL", "p0:1, p1:2")
    monkeypatch.setenv("TWOSTROKE_GATEWAY_DECODE", "ignored:1")
    settings = GatewaySettings.load(["--decode", "d0:3", "--decode", "d1:4", "--strict"])
    assert settings.prefill == ("p0:1", "p1:2")
    assert settings.decode == ("d0:3", "d1:4")
    assert settings.strict
    assert settings.port == 8000


@pytest.mark.parametrize("address", ["nowhere", "host:", ":80", "host:0", "host:99999", "host:http"])
def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address}.* is not host:port"):
        GatewaySettings.load(["--decode", address])


def test_address_parts() -> None:
    assert split_address("decode.example:7000") == ("decode.example", 7000)
    assert split_address("[::1]:7000") == ("::1", 7000)


def test_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_GATEWAY_PREFIL", "p0:1")
    with pytest.raises(ConfigError, match="TWOSTROKE_GATEWAY_PREFIL"):
        GatewaySettings.load([])


def test_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who has what\n\nalice key-a\nbob key-b\nalice key-c\n")
    assert read_api_keys(path) == {"key-a": "alice", "key-b": "bob", "key-c": "alice"}


@pytest.mark.parametrize(
    ("content", "message"),
    [("alice\n", "line 1"), ("a k\nb k\n", "line 2"), ("# nothing\n", "holds no key"), (None, "No such file")],
)
def test_bad_api_keys(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_api_keys(path)
    assert " k" not in str(caught.value).replace(" key", ""), "a key is never shown"


def test_server_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"sixteen bytes or more\n")
    assert read_server_secret(path) == b"sixteen bytes or more"
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_server_secret(path)
