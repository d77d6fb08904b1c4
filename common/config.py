"""Settings: frozen, checked when made, from the command line and the environment, in one place.

Each service's `config` module derives from `Settings` and is the only reader of its settings. `--kv-memory-mib 512` and
`TWOSTROKE_PREFILL_KV_MEMORY_MIB=512` are the same setting; the command line wins. An unknown flag or an unknown
variable with the service's prefix is refused.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from common.errors import ConfigError


class Settings(BaseSettings):
    """Base of every service's settings. Subclasses set `env_prefix` in their model_config."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True, cli_avoid_json=True
    )
    program: ClassVar[str] = "twostroke"

    @classmethod
    def load(cls, argv: Sequence[str]) -> Self:
        """Settings from `argv` and the environment; ConfigError names what is wrong. `--help` prints and exits 0."""
        cls._refuse_unknown_variables(os.environ)
        try:
            source: CliSettingsSource[Self] = CliSettingsSource(cls, cli_prog_name=cls.program)
            return cls(_cli_settings_source=source(args=list(argv)))  # type: ignore[call-arg]
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        except SettingsError as error:  # a variable that holds a list and is no JSON
            raise ConfigError(f"{error}: {error.__cause__}") from None

    @classmethod
    def _refuse_unknown_variables(cls, environ: "os._Environ[str]") -> None:
        prefix = cls.model_config.get("env_prefix", "").upper()
        known = {f"{prefix}{name}".upper() for name in cls.model_fields}
        unknown = sorted(
            key for key in environ if prefix and key.upper().startswith(prefix) and key.upper() not in known
        )
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]} in the environment; known: {', '.join(sorted(known))}")


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_or_exit(settings: type[SettingsT], argv: Sequence[str]) -> SettingsT:
    """`settings.load`, or one line on stderr and exit code 2."""
    try:
        return settings.load(argv)
    except ConfigError as error:
        sys.stderr.write(f"{settings.program}: {error}\n")
        raise SystemExit(2) from None


def cache_dir() -> Path:
    """Where converted models and compiled kernels are kept: $TWOSTROKE_CACHE_DIR, or the user's cache folder."""
    explicit = os.environ.get("TWOSTROKE_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke"


def state_dir() -> Path:
    """Where logs and local spans are kept: $TWOSTROKE_STATE_DIR, or the user's state folder."""
    explicit = os.environ.get("TWOSTROKE_STATE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "twostroke"


class TraceDestination(StrEnum):
    OFF = "off"
    LOCAL_FILE = "local file"
    OTLP_GRPC = "grpc"
    OTLP_HTTP = "http/protobuf"


def trace_destination(environ: Mapping[str, str] | None = None) -> TraceDestination:
    """Where spans go, by OpenTelemetry's own variables; a local file where they ask for nothing.

    What else those variables say (endpoints, headers, sampling, batching) is read by the SDK itself. Raises
    ConfigError for an exporter or a protocol that is not there.
    """
    variables = {key: value.strip() for key, value in (os.environ if environ is None else environ).items()}
    exporter = variables.get("OTEL_TRACES_EXPORTER", "").lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}; it may be otlp or none")
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return TraceDestination.OFF
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not exporter and not any(variables.get(name) for name in endpoints):
        return TraceDestination.LOCAL_FILE
    protocol = variables.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or variables.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    supported = (TraceDestination.OTLP_GRPC, TraceDestination.OTLP_HTTP)
    if protocol and protocol not in supported:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; it may be {' or '.join(supported)}")
    return TraceDestination(protocol) if protocol else TraceDestination.OTLP_GRPC


def _explain(error: ValidationError) -> str:
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"]) or "settings"
        lines.append(f"{name}: {detail['msg']} (got {detail['input']!r})")
    return "; ".join(lines)
