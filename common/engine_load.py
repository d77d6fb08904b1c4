"""How loaded an engine is at one instant, what placement decides by; and what it has done since its start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    free_blocks: int  # allocatable now: unused and cached ones, less reservations
    cached_blocks: int
    reserved_blocks: int
    num_running: int
    num_waiting: int
    queued_tokens: int


@dataclass(slots=True)
class EngineTotals:
    """Counters since start."""

    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    num_steps: int = 0
