"""The prefill service's settings: the only place that reads them."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.engine_config import EngineSettings


class PrefillSettings(EngineSettings):
    model_config = SettingsConfigDict(env_prefix="TWOSTROKE_PREFILL_")
    program: ClassVar[str] = "python -m prefill_svc"

    last_chunk_tokens: int = Field(
        64, ge=1, description="length of a long prompt's last chunk: its blocks alone are sent after the first token"
    )
