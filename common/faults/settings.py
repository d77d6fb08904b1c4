"""The settings of fault injection, which every service has; both must be given."""

from typing import Self

from pydantic import Field, model_validator

from common.config import Settings
from common.errors import ConfigError
from common.faults.plan import FaultPlan, parse_plan


class FaultSettings(Settings):
    faults: str = Field(
        "", description="tests of the system alone: faults to inject, such as kv.ack:drop@0.01;seed=7; default: none"
    )
    allow_fault_injection: bool = Field(False, description="must be given too where faults are to be injected")

    @model_validator(mode="after")
    def _check_faults(self) -> Self:
        if self.faults and not self.allow_fault_injection:
            raise ValueError("faults are given, and allow_fault_injection is not; never set either in production")
        try:
            self.fault_plan()
        except ConfigError as error:
            raise ValueError(error.message) from None
        return self

    def fault_plan(self) -> FaultPlan | None:
        return parse_plan(self.faults) if self.faults else None
