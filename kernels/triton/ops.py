"""TritonOps: the operations on an NVIDIA GPU, or on the CPU in Triton's interpreter (for tests)."""

import torch
import triton

from kernels.batch import AttentionBatch, KVLayerView
from kernels.triton.attention import paged_attention
from kernels.triton.kv_write import write_kv
from kernels.triton.norm import rms_norm


class TritonOps:
    """Serves quantized KV only. What is not a kernel here is elementwise torch, where rows cannot meet."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        """Raises ValueError where the kernels cannot run on `device`."""
        if triton.knobs.runtime.interpret:
            where = f"its interpreter on {device.type}"
        elif device.type == "cuda" and torch.cuda.is_available():
            where = torch.cuda.get_device_name(device)
        else:
            raise ValueError(
                f"kernel backend 'triton' needs a CUDA device that torch sees; the device is {device}, and Triton's "
                "interpreter is off (TRITON_INTERPRET=1 turns it on, for tests): choose device cpu with auto or cpu"
            )
        self.description = f"triton {triton.__version__} on {where}"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayerView, slot_mapping: torch.Tensor, nonfinite: torch.Tensor
    ) -> None:
        write_kv(k, v, layer, slot_mapping, nonfinite)

    def paged_attention(
        self, q: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, scale: float, window: int
    ) -> torch.Tensor:
        return paged_attention(q, layer, batch, scale, window)
