"""By how much quantized weights change what a product gives."""

import torch

from common.model.int8_product import QuantizedWeight


def squared_error(weight: torch.Tensor, quantized: QuantizedWeight, moments: torch.Tensor) -> float:
    """Of all outputs over the inputs with these second moments, in their unit."""
    error = weight.double() - quantized.values.double() * quantized.scales.double()[:, None]
    return float(((error @ moments) * error).sum())
