"""The prefill service's settings: the only place that reads them."""

from typing import ClassVar

from pydantic_settings import SettingsConfigDict

from common.engine_config import EngineSettings


class PrefillSettings(EngineSettings):
    model_config = SettingsConfigDict(env_prefix="TWOSTROKE_PREFILL_")
    program: ClassVar[str] = "python -m prefill_svc"
