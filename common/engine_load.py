"""How loaded an engine is, at one instant; what placement decides by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    free_blocks: int  # allocatable now: unused and cached ones, less reservations
    cached_blocks: int
    reserved_blocks: int
    num_running: int
    num_waiting: int
    queued_tokens: int
