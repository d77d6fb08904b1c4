"""The KV pool's bytes, and views of them. Accounts are in `block_pool`; shapes are in `layout`."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.kv.layout import SCALE_BYTES, KVLayout
from kernels.batch import KVLayerView

_ELEMENT = {"int8": torch.int8, "fp32": torch.float32}


class KVCache:
    """`num_blocks` blocks of `layout` in one tensor [num_blocks, block_bytes] uint8 on `device`."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._bytes = _zeros(num_blocks, layout.block_bytes, device)
        # Torch spreads even small copies over its threads, and waits for them.
        self._host_bytes: NDArray[np.uint8] | None = self._bytes.numpy() if device.type == "cpu" else None
        self._layers = tuple(self._layer_view(layer) for layer in range(layout.num_layers))

    @property
    def layers(self) -> tuple[KVLayerView, ...]:
        """The same tuple at every call."""
        return self._layers

    def layer(self, index: int) -> KVLayerView:
        return self._layers[index]

    def read_blocks(self, block_ids: Sequence[int], num_valid_tokens: int) -> bytes:
        """A copy of the blocks' bytes, one after the other; as `view_blocks` otherwise."""
        return b"".join(self.view_blocks(block_ids, num_valid_tokens))

    def view_blocks(self, block_ids: Sequence[int], num_valid_tokens: int) -> list[memoryview]:
        """The blocks' bytes, in parts of whole blocks: the pool's own memory where it lies on the host, valid for as
        long as the blocks are held. Positions past `num_valid_tokens` (counted from the first of these blocks) are
        zeroed, in a copy, so that nothing of an earlier owner leaves the worker."""
        num_whole = min(max(num_valid_tokens, 0) // self.layout.block_size, len(block_ids))
        parts = self._rows(block_ids[:num_whole])
        for index in range(num_whole, len(block_ids)):
            parts.append(self._cut_block(block_ids[index], num_valid_tokens - index * self.layout.block_size))
        return parts

    def write_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Precondition: `payload` is exactly len(block_ids) blocks, and nobody reads them meanwhile."""
        source = np.frombuffer(payload, np.uint8).reshape(len(block_ids), self.layout.block_bytes)
        if self._host_bytes is not None:
            self._host_bytes[list(block_ids)] = source
        else:
            self._bytes[list(block_ids)] = torch.from_numpy(source.copy()).to(self.device)

    def _rows(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Whole blocks: the pool's own memory on the host, else a copy."""
        pool = self._host_bytes
        if pool is not None:
            return [pool[block_id].data for block_id in block_ids]
        return [self._bytes[list(block_ids)].cpu().numpy().reshape(-1).data]

    def _cut_block(self, block_id: int, num_valid: int) -> memoryview:
        """A copy of a block whose positions from `num_valid` on are zero."""
        copy = self._bytes[block_id : block_id + 1].cpu().clone()
        self._zero_tail(copy, max(num_valid, 0))
        return copy.numpy().reshape(-1).data

    def _layer_view(self, layer: int) -> KVLayerView:
        return _view(self._bytes, self.layout, layer)

    def _zero_tail(self, blocks: torch.Tensor, num_valid: int) -> None:
        for layer in range(self.layout.num_layers):
            view = _view(blocks, self.layout, layer)
            for tensor in (view.k, view.v, view.k_scale, view.v_scale):
                if tensor is not None:
                    tensor[:, :, num_valid:] = 0


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # NumPy asks for huge pages: blocks lie far apart, and small ones cost a walk each
        return torch.from_numpy(np.zeros((num_blocks, block_bytes), np.uint8))
    return torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)


def _view(pool: torch.Tensor, layout: KVLayout, layer: int) -> KVLayerView:
    element = layout.format.element_bytes
    base = layer * layout.layer_bytes

    def values(offset: int) -> torch.Tensor:
        return _strided(
            pool.view(_ELEMENT[layout.format]),
            element,
            (pool.shape[0], layout.num_kv_heads, layout.block_size, layout.head_dim),
            (layout.block_bytes, layout.head_bytes, layout.head_dim * element, element),
            base + offset,
        )

    def scales(offset: int) -> torch.Tensor | None:
        if not layout.format.has_scales:
            return None
        return _strided(
            pool.view(torch.float16),
            SCALE_BYTES,
            (pool.shape[0], layout.num_kv_heads, layout.block_size),
            (layout.block_bytes, layout.head_bytes, SCALE_BYTES),
            base + offset,
        )

    return KVLayerView(
        k=values(layout.k_offset),
        v=values(layout.v_offset),
        k_scale=scales(layout.k_scale_offset),
        v_scale=scales(layout.v_scale_offset),
    )


def _strided(
    typed: torch.Tensor, size: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...], offset_bytes: int
) -> torch.Tensor:
    return typed.as_strided(
        shape, tuple(s // size for s in strides_bytes), typed.storage_offset() + offset_bytes // size
    )
