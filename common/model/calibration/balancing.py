"""Channels scaled by what writes them and by the inverse where they are read, so that both quantize well.

Exact but for rounding: a layer computes the same function. Two pairs have only linear steps between them: V, which the
output projection reads, and the up projection, which the down projection reads. They are scaled in the basis before
their Hadamard transform, which would otherwise mix a channel of small weights with one of large activations.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.model.config import ModelConfig
from common.model.rotation import RotatedModel, hadamard_factors, rotate_columns, rotate_rows, value_factors

_SMALLEST_SHARE = 0.01
"""Of the mean: a channel's weights or values count as at least so large, or one nearly unused gets an endless scale."""
_TINY = 1e-30  # where all of them are zero


@dataclass(frozen=True, slots=True)
class _Pair:
    writer: str
    reader: str
    writer_factors: list[torch.Tensor]  # the Hadamard transform of the writer's outputs
    reader_factors: list[torch.Tensor]  # of the reader's inputs
    num_groups: int
    num_copies: int  # inputs of the reader that each output of the writer becomes, in each group

    def reads(self, of_writer: torch.Tensor) -> torch.Tensor:
        """[writer's outputs] -> [reader's inputs]."""
        grouped = of_writer.view(self.num_groups, 1, -1)
        return grouped.expand(self.num_groups, self.num_copies, grouped.shape[2]).reshape(-1)

    def summed(self, of_reader: torch.Tensor) -> torch.Tensor:
        """[reader's inputs] -> [writer's outputs]."""
        return of_reader.view(self.num_groups, self.num_copies, -1).sum(1).reshape(-1)


@dataclass(frozen=True, slots=True)
class BalancedLayer:
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]


def balanced_layer(
    rotated: RotatedModel, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
) -> BalancedLayer:
    """`weights` of one layer without their prefix, fp32; `moments` of what products read, by the product's name, fp64
    (see `second_moments`). Comes with the moments of what products read then."""
    balanced, seen = dict(weights), dict(moments)
    for pair in _pairs(rotated.config, rotated.down_block):
        reading = weights[f"{pair.reader}.weight"]
        if pair.reader in moments and reading.isfinite().all():
            _balance(pair, balanced, seen)
    return BalancedLayer(balanced, seen)


def _pairs(config: ModelConfig, down_block: int) -> tuple[_Pair, ...]:
    of_values = value_factors(config)
    num_copies = config.num_heads // config.num_kv_heads
    return (
        _Pair("self_attn.v_proj", "self_attn.o_proj", of_values, of_values, config.num_kv_heads, num_copies),
        _Pair("mlp.up_proj", "mlp.down_proj", [], hadamard_factors(down_block), 1, 1),
    )


def _balance(pair: _Pair, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> None:
    """Both mutated. In fp64 until the last rounding. A Hadamard transform is its own inverse."""
    factors = pair.reader_factors
    reading = rotate_rows(weights[f"{pair.reader}.weight"].double(), factors)
    seen = _both_sides(moments[pair.reader], factors)
    scales = _scales(pair.summed(reading.square().sum(0)), pair.summed(seen.diagonal().clone()))
    of_reader = pair.reads(scales)
    weights[f"{pair.reader}.weight"] = rotate_rows(reading / of_reader, factors).float()
    moments[pair.reader] = _both_sides(seen * of_reader * of_reader[:, None], factors)
    for name in (f"{pair.writer}.weight", f"{pair.writer}.bias"):
        if name in weights:
            columns = weights[name].double().view(len(scales), -1)
            plain = rotate_columns(columns, pair.writer_factors) * scales[:, None]
            weights[name] = rotate_columns(plain, pair.writer_factors).float().view(weights[name].shape).contiguous()


def _both_sides(moments: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    return rotate_columns(rotate_rows(moments, factors), factors)


def _scales(weights_squared: torch.Tensor, values_squared: torch.Tensor) -> torch.Tensor:
    """[channels] each: the scales after which a channel's weights are to its values as any other channel's."""
    ratios = _magnitudes(weights_squared) / _magnitudes(values_squared)
    logarithms = 0.5 * ratios.log()
    return (logarithms - logarithms.mean()).exp()


def _magnitudes(squares: torch.Tensor) -> torch.Tensor:
    magnitudes = squares.clamp_min(0.0).sqrt()
    return magnitudes.clamp_min(float(_SMALLEST_SHARE * magnitudes.mean()) + _TINY)
