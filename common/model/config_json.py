"""JSON of the model's files: ModelConfig written and read back exactly, and objects that others wrote."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from common.errors import ModelLoadError
from common.model.config import Family, ModelConfig

CONFIG_FIELDS = tuple(field.name for field in fields(ModelConfig))


def config_to_json(config: ModelConfig) -> bytes:
    """Canonical: equal configurations give equal bytes. Floats are written so that they read back exactly."""
    return canonical_json(asdict(config))


def config_from_json(data: bytes) -> ModelConfig:
    """Precondition: `data` came from `config_to_json` of this version."""
    values: dict[str, Any] = json.loads(data)
    values["family"] = Family(values["family"])
    arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return ModelConfig(**arguments)


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON file that must hold an object; ModelLoadError names it otherwise."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds a JSON {type(content).__name__}; an object was expected")
    return content
