"""Orthogonal changes of basis, folded into the weights, that leave no outliers for int8 activations to stumble over.

Exact but for rounding: the rotated model computes the same function. Three of them: the residual stream, V of each
head, and the down projection's input (whose half is computed online, see `kernels.quantized.hadamard`). The values of
V in the KV cache change, so ROTATION is part of the model's fingerprint. It names the transform of K and Q at run time,
too (`transformer.head_block`), which no weight knows of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from common.model.config import ModelConfig

ROTATION = "rot2"
"""Names everything below that a weight depends on. Whoever changes it gives it another name."""
_SEED = 20_261_129
_MAX_HADAMARD_FACTOR = 64
_MAX_DOWN_BLOCK = 512
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, slots=True)
class RotatedModel:
    config: ModelConfig  # the head is untied
    weights: Mapping[str, torch.Tensor]
    down_block: int  # the weights expect this Hadamard transform on the down projection's input
    skipped: tuple[str, ...]  # what could not be rotated, and why


def rotate(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> RotatedModel:
    """`weights` as in `Transformer`, fp32. Each rotated tensor is made anew whenever it is asked for."""
    return rotated_model(config, _RotatedWeights(config, weights))


def rotated_model(config: ModelConfig, rotated: Mapping[str, torch.Tensor]) -> RotatedModel:
    """`config` as before the rotation, the weights as after it."""
    down_block, skipped = _down_block(config), []
    if not _rotates_v(config):
        skipped.append(f"V of each head: head_dim {config.head_dim} is no power of two")
    if down_block == 1:
        skipped.append(f"the down projection's input: intermediate_size {config.intermediate_size} is odd")
    if not folds_into_keys(config):
        skipped.append("K and Q of each head: a norm between product and rope weighs each value by itself (qk_norm)")
    return RotatedModel(replace(config, tie_word_embeddings=False), rotated, down_block, tuple(skipped))


def folds_into_keys(config: ModelConfig) -> bool:
    """Whether what changes K and Q after rope's pairs can be folded into the products that write them."""
    return not config.qk_norm


class _RotatedWeights(Mapping[str, torch.Tensor]):
    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._head_source = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self._residual = _residual_factors(config.hidden_size)
        self._head_dim = value_factors(config)
        self._down = hadamard_factors(_down_block(config))

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        if "lm_head.weight" not in self._weights:
            yield "lm_head.weight"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> torch.Tensor:
        """In fp64 until the last rounding, so that another order of sums hardly ever changes an fp32 value."""
        weight = self._weights[self._head_source if name == "lm_head.weight" else name]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # by far the largest: fp64 of a part at a time
            return torch.cat([self._rotated(name, part.double()).float() for part in weight.split(_ROWS_AT_A_TIME)])
        return self._rotated(name, weight.double()).float().contiguous()

    def _rotated(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            return self._rotated_in_layer(layer, part, weight)
        match name:
            case "model.embed_tokens.weight":
                return rotate_rows(weight, self._residual)
            case "lm_head.weight":
                return rotate_rows(weight * self._weights["model.norm.weight"].double(), self._residual)
            case _:  # the final norm, whose weight moves into the head
                return torch.ones_like(weight)

    def _rotated_in_layer(self, layer: str, part: str, weight: torch.Tensor) -> torch.Tensor:
        match part:
            case "input_layernorm.weight" | "post_attention_layernorm.weight":
                return torch.ones_like(weight)
            case "self_attn.q_proj.weight" | "self_attn.k_proj.weight":
                return self._reads_residual(weight, layer, "input_layernorm")
            case "self_attn.v_proj.weight":
                return rotate_columns(self._reads_residual(weight, layer, "input_layernorm"), self._head_dim)
            case "self_attn.v_proj.bias":
                return rotate_rows(weight, self._head_dim)
            case "self_attn.o_proj.weight":
                return rotate_columns(rotate_rows(weight, self._head_dim), self._residual)
            case "mlp.gate_proj.weight" | "mlp.up_proj.weight":
                return self._reads_residual(weight, layer, "post_attention_layernorm")
            case "mlp.down_proj.weight":
                return rotate_columns(rotate_rows(weight, self._down), self._residual)
            case "self_attn.o_proj.bias" | "mlp.down_proj.bias":
                return rotate_rows(weight, self._residual)
            case _:  # biases of q, k, gate and up; norms of q and k: not in a rotated basis
                return weight

    def _reads_residual(self, weight: torch.Tensor, layer: str, norm: str) -> torch.Tensor:
        """The norm's weight moves into the product that reads it: what is left of the norm commutes with a rotation."""
        norm_weight = self._weights[f"model.layers.{layer}.{norm}.weight"].double()
        return rotate_rows(weight * norm_weight, self._residual)


def value_factors(config: ModelConfig) -> list[torch.Tensor]:
    """Of the Hadamard transform of each head's V; none where it is not rotated."""
    return hadamard_factors(config.head_dim) if _rotates_v(config) else []


def _rotates_v(config: ModelConfig) -> bool:
    return _power_of_two(config.head_dim) == config.head_dim


def _down_block(config: ModelConfig) -> int:
    return min(_power_of_two(config.intermediate_size), _MAX_DOWN_BLOCK)


def rotate_rows(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """Each run of a row of x [..., n] times the Kronecker product of `factors` [f, f]; the runs' length divides n."""
    return _rotate_runs(x, factors, 1)


def rotate_columns(weight: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """The same of the columns of weight [n, m]: the outputs of the product come out rotated."""
    return _rotate_runs(weight, factors, weight.shape[1])


def _rotate_runs(x: torch.Tensor, factors: list[torch.Tensor], inner: int) -> torch.Tensor:
    """`inner` elements lie between two of a run."""
    y = x
    right = inner * prod(factor.shape[0] for factor in factors)
    for factor in factors:
        right //= factor.shape[0]
        blocks = y.reshape(-1, factor.shape[0], right)
        y = blocks[..., 0] @ factor if right == 1 else torch.matmul(factor.T, blocks)
    return y.reshape(x.shape)


def hadamard_factors(size: int) -> list[torch.Tensor]:
    """Orthonormal Hadamard matrices in fp64 whose Kronecker product is the one of `size`, a power of two."""
    factors = []
    while size > 1:
        part = min(size, _MAX_HADAMARD_FACTOR)
        factors.append(_hadamard_matrix(part))
        size //= part
    return factors


def _hadamard_matrix(size: int) -> torch.Tensor:
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


def _residual_factors(size: int) -> list[torch.Tensor]:
    """A random orthogonal matrix for the odd part of `size`, Hadamard matrices for its power of two.

    Every entry of the whole is about as small as it can be, and a product costs the sum of the factors' sizes instead
    of `size` itself. The fixed numbers come from NumPy's PCG64, the same on every machine.
    """
    even = _power_of_two(size)
    gaussian = np.random.Generator(np.random.PCG64(_SEED)).standard_normal((size // even, size // even))
    q, r = np.linalg.qr(gaussian)
    return [torch.from_numpy(q * np.sign(np.diag(r))), *hadamard_factors(even)]


def _power_of_two(size: int) -> int:
    """The largest one that divides `size`."""
    return size & -size
