"""Weights from a prepared model's files to tensors on a device."""

import torch

from common.model.checkpoint import named_errors, wanted_tensors
from common.model.prepared import PreparedModel


def load_weights(prepared: PreparedModel, device: torch.device) -> dict[str, torch.Tensor]:
    """fp32 tensors under Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`, [out, in]); no
    `lm_head.weight` when it is tied to the embedding.

    On the CPU, fp32 files are mapped, not copied: processes share the pages.
    Raises ModelLoadError that names the file and the tensor.
    """
    weights: dict[str, torch.Tensor] = {}
    for file, name, content in wanted_tensors(prepared.weight_files, prepared.config, "pt"):
        with named_errors(file):
            weights[name] = content.get_tensor(name).to(device=device, dtype=torch.float32)
    return weights
