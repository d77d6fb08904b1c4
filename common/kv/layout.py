"""The only place that knows the shapes, strides and bytes of a KV block.

A block is `block_size` consecutive positions, all layers, one contiguous run of bytes:

    block   = layer 0 | layer 1 | ...
    layer   = head 0 | head 1 | ...
    head    = K [block_size, head_dim] | V (the same) | k_scale [block_size] | v_scale [block_size] | padding

Scales (fp16, one per token and head) are there in quantized formats only. Every head's region starts at a multiple
of REGION_ALIGNMENT bytes.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from common.errors import ConfigError

REGION_ALIGNMENT = 64
SCALE_BYTES = 2


class KVFormat(StrEnum):
    INT8 = "int8"
    FP32 = "fp32"  # unquantized: for reference runs

    @property
    def element_bytes(self) -> int:
        return 1 if self is KVFormat.INT8 else 4

    @property
    def has_scales(self) -> bool:
        return self is KVFormat.INT8


@dataclass(frozen=True, slots=True)
class KVLayout:
    format: KVFormat
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"KV layout: {name} is {value}; it must be at least 1")

    @property
    def values_bytes(self) -> int:
        """Bytes of K (or V) of one head of one layer of one block."""
        return self.block_size * self.head_dim * self.format.element_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's region, padding included."""
        scales = 2 * self.block_size * SCALE_BYTES if self.format.has_scales else 0
        return _align(2 * self.values_bytes + scales, REGION_ALIGNMENT)

    @property
    def layer_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def k_offset(self) -> int:
        """Offsets are in bytes from the start of a head's region."""
        return 0

    @property
    def v_offset(self) -> int:
        return self.values_bytes

    @property
    def k_scale_offset(self) -> int:
        return 2 * self.values_bytes

    @property
    def v_scale_offset(self) -> int:
        return 2 * self.values_bytes + self.block_size * SCALE_BYTES

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def can_be_sent_as(self, wanted: "KVLayout") -> bool:
        """Whether blocks of this layout can be sent to a worker of layout `wanted`: equal, or wider in the format and
        equal in all else."""
        is_wider = not self.format.has_scales and wanted.format.has_scales
        return self == wanted or (is_wider and replace(self, format=wanted.format) == wanted)

    def describe(self) -> str:
        """One line that names the layout; equal lines, equal layouts."""
        return (
            f"{self.format} block_size={self.block_size} layers={self.num_layers} "
            f"kv_heads={self.num_kv_heads} head_dim={self.head_dim}"
        )


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
