"""The forward pass on the int8 path as one compiled call (`kernels.step`): the same bits as `Transformer` computes from
single operations, without Python between them."""

from collections.abc import Mapping

import torch

from common.kv.cache import KVCache
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.int8_product import QuantizedWeight, quantize_weight
from common.model.layer_weights import LayerWeights, head_weights, layer_weights
from common.model.linear import LinearWeights, Norm, Numerics
from common.model.transformer import ForwardResult, head_block, rotation_table
from kernels.step import StepBatch, StepCompiler, StepLayer, StepModel, StepProduct

_CPU = torch.device("cpu")


class CompiledTransformer:
    """See `Transformer` for the arguments, and `ForwardPass`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        compiler: StepCompiler,
        max_model_len: int | None = None,
        down_block: int = 1,
    ) -> None:
        self.config = config
        self.device = _CPU
        cos, sin = rotation_table(config, max_model_len or config.max_model_len, _CPU)
        norm, head = head_weights(config, weights)
        self.step = compiler.compile_step(
            StepModel(
                embedding=weights["model.embed_tokens.weight"],
                cos=cos,
                sin=sin,
                layers=[_step_layer(layer_weights(config, weights, index)) for index in range(config.num_layers)],
                head=_step_product(head, norm),
                head_offset=norm.offset,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
                hadamard_block=down_block,
                head_block=head_block(config, Numerics.INT8),
            )
        )

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardResult:
        """See `ForwardPass`."""
        with torch.inference_mode():
            nonfinite = torch.zeros(batch.token_ids.shape[0], dtype=torch.int32)
            rows = StepBatch(batch.token_ids, batch.positions, batch.logit_rows, batch.attention)
            return ForwardResult(self.step.run(rows, cache.layers, nonfinite), nonfinite)


def _step_layer(weights: LayerWeights) -> StepLayer:
    return StepLayer(
        qkv=_step_product(weights.qkv, weights.attention_norm),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        key_offset=weights.key_offset,
        attention_offset=weights.attention_norm.offset,
        mlp_offset=weights.mlp_norm.offset,
        output=_step_product(weights.output),
        gate_up=_step_product(weights.gate_up, weights.mlp_norm),
        down=_step_product(weights.down),
        window=weights.window,
    )


def _step_product(weights: LinearWeights, norm: Norm | None = None) -> StepProduct:
    """A weight that is quantized already has the norm before it inside."""
    weight = weights.weight
    if not isinstance(weight, QuantizedWeight):
        weight = quantize_weight(weight if norm is None else weight * norm.weight)
    return StepProduct(weight.values, weight.scales, weights.bias)
