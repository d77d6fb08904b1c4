"""Sums of floating-point values that come out the same in any order."""

import torch

_STEPS = float(2**15)
_TINY = 1e-30  # where all values are zero


def in_steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [...] fp32 in steps, 2^-15 of its largest: integers, in fp64, and the step. Sums of up to 2^23 of their squares
    are integers that fp64 holds."""
    step = x.abs().amax().double().clamp_min(_TINY) / _STEPS
    return (x.double() / step).round_(), step
