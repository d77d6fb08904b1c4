"""The gateway's settings: the only place that reads them from the command line and the environment."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from common.errors import ConfigError
from common.faults.settings import FaultSettings
from common.rpc.limits import PROGRESS_INTERVAL_S
from gateway.generation import OnFailure

MIN_SECRET_BYTES = 16
Addresses = Annotated[tuple[str, ...], NoDecode]


class GatewaySettings(FaultSettings):
    """Addresses are `host:port`, several with commas between; a host name may stand for several workers."""

    model_config = SettingsConfigDict(env_prefix="TWOSTROKE_GATEWAY_")
    program: ClassVar[str] = "python -m gateway"

    host: str = Field("127.0.0.1", description="where the HTTP API listens")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP API; 0: any free one")
    prefill: Addresses = Field((), description="addresses of prefill workers; none: decode computes prompts too")
    decode: Addresses = Field((), description="addresses of decode workers")
    model_name: str | None = Field(None, description="the model's name in the API; default: what the workers say")

    tls_dir: Path | None = Field(
        None, description="folder with tls.crt, tls.key and ca.crt, for mutual TLS with the workers; none: plain text"
    )

    redis_url: str | None = Field(None, description="the prefix index; none: routing by load alone")
    index_timeout_ms: float = Field(50.0, gt=0, description="longest wait for the prefix index")

    api_keys_file: Path | None = Field(None, description="lines of `tenant key`; none: open to everyone")
    operator_key_file: Path | None = Field(
        None, description="key of the operator's routes; none: they serve only where `host` is this machine's"
    )
    server_secret_file: Path | None = Field(
        None, description="what tenant salts are derived from; none: drawn at start"
    )

    max_active_requests: int = Field(256, ge=1, description="generations at once; more are refused with 429")
    max_body_bytes: int = Field(4 << 20, ge=1, description="longest request body")
    strict: bool = Field(False, description="an error instead of an answer computed in another way than planned")
    prefill_window_tokens: int = Field(
        4096, ge=1, description="prompt tokens that a prefill worker may have queued; more prompts wait in the gateway"
    )
    on_failure: OnFailure = Field(
        OnFailure.RETRY_OTHER,
        description="when a worker or a transfer fails, of requests that do not say: fail, recompute or retry_other",
    )
    max_retries: int = Field(2, ge=0, description="failures of workers that one generation survives")
    retry_ratio: float = Field(1.0, ge=0, description="retries that each generation adds to what all may make")
    retry_reserve: int = Field(256, ge=0, description="retries that all generations may make at once")
    progress_timeout_s: float = Field(
        60.0,
        ge=3 * PROGRESS_INTERVAL_S,
        description="a worker of which a request hears nothing for this long is lost to it",
    )
    reconnect_wait_s: float = Field(30.0, ge=0, description="after a failure, wait so long for a worker that may serve")
    client_timeout_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="a client that takes no more of its answer, or sends no more of its request, so long has left",
    )
    drain_grace_s: float = Field(30.0, ge=0, description="streams may finish for this long after SIGTERM")
    discovery_interval_s: float = Field(5.0, gt=0, description="time between two look-ups of host names")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")

    @field_validator("prefill", "decode", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("prefill", "decode")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            split_address(address)
        return addresses

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, level: str) -> str:
        if level.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise ValueError("allowed: DEBUG, INFO, WARNING, ERROR")
        return level.upper()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6 address]:port`; ValueError names what is wrong."""
    host, separator, port = address.rpartition(":")
    bare_host = host.removeprefix("[").removesuffix("]")
    if not separator or not bare_host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return bare_host, int(port)


def read_server_secret(path: Path) -> bytes:
    return _read_secret("server_secret_file", path)


def read_operator_key(path: Path) -> bytes:
    return _read_secret("operator_key_file", path)


def _read_secret(setting: str, path: Path) -> bytes:
    """The file's bytes; at least 16, so that it cannot be guessed."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"{setting} {path} holds {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}")
    return secret


def read_api_keys(path: Path) -> dict[str, str]:
    """key -> tenant. Empty lines and lines that start with # are skipped."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"api_keys_file {path}: {error.strerror}") from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"api_keys_file {path}, line {number}: expected `tenant key`, found {len(words)} words")
        tenant, key = words
        if key in tenants:
            raise ConfigError(f"api_keys_file {path}, line {number}: the key of tenant {tenant} is there already")
        tenants[key] = tenant
    if not tenants:
        raise ConfigError(f"api_keys_file {path} holds no key")
    return tenants
