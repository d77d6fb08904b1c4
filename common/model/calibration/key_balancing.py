"""K of each head scaled and moved so that little is lost when K and Q become int8; Q scaled inversely.

Two changes of K leave every weight of attention as it is, but for rounding:

- Rope turns each pair of a head's values (i and i + head_dim / 2), and turning commutes with scaling both. So a pair's
  scale folds into the products that write K, and its inverse into those that write Q.
- A vector taken off all keys of a head, whatever their positions, takes the same off all scores of a query. About half
  of what keys are after rope is such an offset: their mean. (SageAttention smooths keys so, arXiv 2410.02367; here the
  mean is the calibration text's, since a cache that grows has none.) It is taken off at run time, after the Hadamard
  transform of each head (`transformer.head_block`), which needs no room in any weight.

One scale serves all values of a head, and the transform spreads large ones over all. So a vector's error is a share of
its length, a score's a share of |q| |k - mean|, and scales s of pairs make sum |(k - mean) s|^2 * sum |q / s|^2 the
least where both are alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.model.calibration.exact_sums import in_steps
from common.model.config import ModelConfig
from common.model.rotation import folds_into_keys
from kernels.quantized import hadamard

KEY_OFFSET = "self_attn.k_offset"
"""[num_kv_heads * head_dim] fp32."""
_SMALLEST_SHARE = 0.01
"""Of a head's mean: a pair counts as at least so large, or one nearly unused gets an endless scale."""
_TINY = 1e-30  # where all of them are zero


@dataclass(frozen=True, slots=True)
class KeyMoments:
    """Of one layer, over tokens; fp64. `deviations` and `query_sizes` are sums of squares of pairs [num_kv_heads,
    head_dim / 2], up to a common factor each; those of a KV head's queries are added up."""

    means: torch.Tensor  # [num_kv_heads, head_dim]
    deviations: torch.Tensor  # of keys from their means
    query_sizes: torch.Tensor


def key_moments(keys: torch.Tensor, queries: torch.Tensor) -> KeyMoments | None:
    """keys [T, num_kv_heads, head_dim], queries [T, num_heads, head_dim], fp32, after rope. None without finite
    tokens."""
    is_finite = (keys.sum((1, 2)) + queries.sum((1, 2))).isfinite()
    num_tokens = int(is_finite.sum())
    if num_tokens == 0:
        return None
    (k, step), (q, _) = in_steps(keys[is_finite]), in_steps(queries[is_finite])
    sums = k.sum(0)
    deviations = k.square().sum(0) - sums.square() / num_tokens
    of_queries = _of_pairs(q.square().sum(0)).view(k.shape[1], -1, k.shape[2] // 2).sum(1)
    return KeyMoments(sums * (step / num_tokens), _of_pairs(deviations).clamp_min(0.0), of_queries)


def balanced_keys(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], moments: KeyMoments | None, head_block: int
) -> dict[str, torch.Tensor]:
    """`weights` of one layer without their prefix, fp32, and KEY_OFFSET, as it is after the Hadamard transform of
    `head_block`. Without moments they are left as they are; without scales where a norm between product and rope weighs
    each value by itself (see `rotation.folds_into_keys`)."""
    balanced = dict(weights)
    if moments is None:
        return balanced
    means = moments.means
    if folds_into_keys(config):
        scales = _scales(moments)
        group_size = config.num_heads // config.num_kv_heads
        _multiply(balanced, "self_attn.k_proj", scales)
        _multiply(balanced, "self_attn.q_proj", (1 / scales).repeat_interleave(group_size, dim=0))
        means = means * scales.repeat(1, 2)
    balanced[KEY_OFFSET] = hadamard(means, head_block).float().view(-1)
    return balanced


def _of_pairs(x: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] -> [..., head_dim / 2], sums."""
    low, high = x.chunk(2, dim=-1)
    return low + high


def _multiply(weights: dict[str, torch.Tensor], product: str, scales: torch.Tensor) -> None:
    """Rows of a weight [heads * head_dim, K] and of its bias, times scales [heads, head_dim / 2]; mutates `weights`."""
    of_rows = scales.repeat(1, 2).view(-1)
    for name in (f"{product}.weight", f"{product}.bias"):
        if name in weights:
            weight = weights[name].double()
            weights[name] = (weight * of_rows.view(-1, *[1] * (weight.dim() - 1))).float()


def _scales(moments: KeyMoments) -> torch.Tensor:
    """[num_kv_heads, head_dim / 2]; the mean square of what is left of a head's K stays, and with it the range of its
    scale."""
    scales = (_magnitudes(moments.query_sizes) / _magnitudes(moments.deviations)).sqrt()
    before = moments.deviations.sum(1, keepdim=True)
    after = (moments.deviations * scales.square()).sum(1, keepdim=True)
    return torch.where(after > 0, scales * (before / after).sqrt(), 1.0)


def _magnitudes(sizes: torch.Tensor) -> torch.Tensor:
    magnitudes = sizes.sqrt()
    return magnitudes.maximum(_SMALLEST_SHARE * magnitudes.mean(1, keepdim=True) + _TINY)
