"""The decode service's settings: the only place that reads them."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from common.engine_config import EngineSettings


class DecodeSettings(EngineSettings):
    model_config = SettingsConfigDict(env_prefix="TWOSTROKE_DECODE_")
    program: ClassVar[str] = "python -m decode_svc"

    max_num_sequences: int = Field(256, ge=1, description="sequences in the batch")
    preemption_shield_tokens: int = Field(
        512, ge=1, description="a sequence with more generated tokens is preempted last"
    )
    speculation: bool = Field(True, description="propose draft tokens by prompt lookup; the tokens stay the same")
    num_draft_tokens: int = Field(4, ge=1, le=32, description="draft tokens that a step verifies for each sequence")
    speculation_max_batch: int = Field(8, ge=1, description="with more running sequences nothing is proposed")
    lease_s: float = Field(30.0, gt=0, description="a reservation that nobody waits for ends after this long")
