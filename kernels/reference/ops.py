"""Plain torch, slow and obvious: what every other backend must agree with. Works on any device."""

import torch

from kernels.batch import AttentionBatch, KVLayerView
from kernels.contract import QUANT_MAX, SCALE_FLOOR


class ReferenceOps:
    """See `kernels.contract.Ops`."""

    name = "reference"
    description = "plain torch, fp32"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + eps) * weight

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, layer: KVLayerView, slot_mapping: torch.Tensor, nonfinite: torch.Tensor
    ) -> None:
        blocks, offsets = slot_mapping // layer.block_size, slot_mapping % layer.block_size
        for new, values, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
            if scales is None:
                stored, is_bad = _without_nonfinite(new)
            else:
                stored, scale, is_bad = quantize(new)
                scales[blocks, :, offsets] = scale
            values[blocks, :, offsets] = stored
            nonfinite += is_bad.sum(dim=-1, dtype=torch.int32)

    def paged_attention(
        self, q: torch.Tensor, layer: KVLayerView, batch: AttentionBatch, scale: float, window: int
    ) -> torch.Tensor:
        output = torch.empty_like(q)
        starts = batch.query_start.tolist()
        for s, context_len in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            k, v = gather(layer, batch.block_tables[s], context_len)
            output[rows] = _attend(q[rows], k, v, scale, window)
        return output


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., D] fp32 -> values [..., D] int8, scale [...] fp16, and whether a vector could not be represented."""
    scale = (x.abs().amax(dim=-1) / QUANT_MAX).clamp_min(SCALE_FLOOR).half()
    is_bad = ~(x.isfinite().all(dim=-1) & scale.isfinite())
    scale = torch.where(is_bad, SCALE_FLOOR, scale)
    x = torch.where(is_bad.unsqueeze(-1), 0.0, x)
    values = torch.round(x / scale.float().unsqueeze(-1)).clamp(-QUANT_MAX, QUANT_MAX)
    return values.to(torch.int8), scale, is_bad


def gather(layer: KVLayerView, block_table: torch.Tensor, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions 0 .. context_len of one sequence, dequantized: [context_len, H, D] fp32 each."""
    positions = torch.arange(context_len, device=layer.k.device)
    blocks, offsets = block_table[positions // layer.block_size].long(), positions % layer.block_size
    k, v = layer.k[blocks, :, offsets].float(), layer.v[blocks, :, offsets].float()
    if layer.k_scale is None or layer.v_scale is None:
        return k, v
    k_scale, v_scale = layer.k_scale[blocks, :, offsets].float(), layer.v_scale[blocks, :, offsets].float()
    return k * k_scale.unsqueeze(-1), v * v_scale.unsqueeze(-1)


def _without_nonfinite(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_bad = ~x.isfinite().all(dim=-1)
    return torch.where(is_bad.unsqueeze(-1), 0.0, x), is_bad


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """q [n, Hq, D]: the last n of the context's positions; k, v [context_len, H, D]."""
    num_queries, context_len = q.shape[0], k.shape[0]
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    query_position = torch.arange(context_len - num_queries, context_len, device=q.device).unsqueeze(1)
    key_position = torch.arange(context_len, device=q.device)
    is_visible = key_position <= query_position
    if window > 0:
        is_visible &= key_position > query_position - window
    weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
