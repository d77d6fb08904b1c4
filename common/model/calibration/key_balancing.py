"""K of each head turned and scaled so that little is lost when K and Q become int8; Q the same way but inversely.

Rope turns each pair of a head's values (i and i + head_dim / 2) by an angle of its own. Read as one complex number, a
pair is multiplied by a number of modulus 1, so multiplying it by another one before or after makes no difference: that
number can be folded into the products that write K and Q, and every score stays. Exact but for rounding.

One scale serves all values of a head. At run time a Hadamard transform of each head (`transformer.head_block`) spreads
large values over all, so that a vector's error is a share of its length, and a score's a share of |q| |k|. Scales s of
pairs make sum |k s|^2 * sum |q / s|^2 the least where |k s| = |q / s|. Before, a pair whose values lie along one
direction is turned until that direction is the diagonal, which both values share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi

import torch

from common.model.config import ModelConfig
from common.model.rotation import folds_into_keys

_KEY_EXPONENT, _QUERY_EXPONENT = -0.5, 0.5
_STEPS = float(2**15)
"""Values are counted in this many steps of the largest: sums of their squares are integers that fp64 holds, the same
in any order."""
_SMALLEST_SHARE = 0.01
"""Of a head's mean: a pair counts as at least so large, or one nearly unused gets an endless scale."""
_TINY = 1e-30  # where all of them are zero


@dataclass(frozen=True, slots=True)
class PairMoments:
    """Sums over tokens of one layer's pairs k, q as complex numbers, up to a common factor each; [num_kv_heads,
    head_dim / 2] fp64, complex fp64 the first. Those of a KV head's queries are added up."""

    keys_squared: torch.Tensor  # of k * k: its direction is twice that of the values
    key_sizes: torch.Tensor  # of |k|^2
    query_sizes: torch.Tensor  # of |q|^2


def pair_moments(keys: torch.Tensor, queries: torch.Tensor) -> PairMoments | None:
    """keys [T, num_kv_heads, head_dim], queries [T, num_heads, head_dim], after rope. None without finite tokens."""
    is_finite = (keys.sum((1, 2)) + queries.sum((1, 2))).isfinite()
    if not is_finite.any():
        return None
    k, q = _pairs(_in_steps(keys[is_finite])), _pairs(_in_steps(queries[is_finite]))
    of_queries = (q * q.conj()).real.sum(0)
    return PairMoments(
        (k * k).sum(0), (k * k.conj()).real.sum(0), of_queries.view(k.shape[1], -1, k.shape[2]).sum(1)
    )  # fmt: skip


def balanced_keys(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], moments: PairMoments | None
) -> dict[str, torch.Tensor]:
    """`weights` of one layer without their prefix, fp32. Left as they are where a norm between product and rope weighs
    each value by itself (see `rotation.folds_into_keys`), and without moments."""
    balanced = dict(weights)
    if moments is None or not folds_into_keys(config):
        return balanced
    turns = torch.polar(torch.ones_like(moments.key_sizes), pi / 4 - moments.keys_squared.angle() / 2)
    scales = _scales(moments)
    group_size = config.num_heads // config.num_kv_heads
    factors = {
        "self_attn.k_proj": turns * scales,
        "self_attn.q_proj": (turns / scales).repeat_interleave(group_size, dim=0),
    }
    for product, of_product in factors.items():
        for name in (f"{product}.weight", f"{product}.bias"):
            if name in balanced:
                balanced[name] = _multiplied(balanced[name], of_product)
    return balanced


def _in_steps(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().amax().double().clamp_min(_TINY)
    return (x.double() * (_STEPS / largest)).round_()


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] -> [..., head_dim / 2] complex."""
    return torch.complex(*x.chunk(2, dim=-1))


def _multiplied(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Rows of weight [heads * head_dim, K], or of a bias [heads * head_dim], times factors [heads, head_dim / 2]."""
    rows = weight.double().view(factors.shape[0], 2, factors.shape[1], -1)
    real, imaginary = factors.real[..., None], factors.imag[..., None]
    turned = torch.stack((rows[:, 0] * real - rows[:, 1] * imaginary, rows[:, 0] * imaginary + rows[:, 1] * real), 1)
    return turned.float().view(weight.shape)


def _scales(moments: PairMoments) -> torch.Tensor:
    """[num_kv_heads, head_dim / 2]; the mean square of a head's K stays, and with it the range of its scale."""
    scales = _magnitudes(moments.key_sizes) ** _KEY_EXPONENT * _magnitudes(moments.query_sizes) ** _QUERY_EXPONENT
    before = moments.key_sizes.sum(1, keepdim=True)
    after = (moments.key_sizes * scales.square()).sum(1, keepdim=True)
    return torch.where(after > 0, scales * (before / after).sqrt(), 1.0)


def _magnitudes(sizes: torch.Tensor) -> torch.Tensor:
    magnitudes = sizes.sqrt()
    return magnitudes.maximum(_SMALLEST_SHARE * magnitudes.mean(1, keepdim=True) + _TINY)
