"""The shape of a local stack: how many prefill and decode services stand behind one gateway."""

import re
from dataclasses import dataclass
from typing import Self

MAX_SERVICES_PER_ROLE = 64


@dataclass(frozen=True, slots=True)
class Topology:
    num_prefill: int
    num_decode: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`colocated` (decode alone does both strokes) or `NpMd`, such as `2p1d`. Raises ValueError with the reason."""
        if text == "colocated":
            return cls(num_prefill=0, num_decode=1)
        match = re.fullmatch(r"([0-9]{1,3})p([0-9]{1,3})d", text)
        if match is None:
            raise ValueError(f"{text!r} is no topology; use colocated, 1p1d, 2p2d or any other NpMd")
        num_prefill, num_decode = int(match[1]), int(match[2])
        if num_prefill == 0:
            raise ValueError(f"{text!r} has no prefill service; for decode alone use colocated")
        if num_decode == 0:
            raise ValueError(f"{text!r} has no decode service, and a stack needs at least one")
        if max(num_prefill, num_decode) > MAX_SERVICES_PER_ROLE:
            raise ValueError(f"{text!r} asks for more than {MAX_SERVICES_PER_ROLE} services of one role")
        return cls(num_prefill, num_decode)

    def __str__(self) -> str:
        return f"{self.num_prefill}p{self.num_decode}d" if self.num_prefill else "colocated"

    def describe(self) -> str:
        decode = f"{self.num_decode} decode"
        return f"{self.num_prefill} prefill, {decode}" if self.num_prefill else f"{decode}, which prefills too"
