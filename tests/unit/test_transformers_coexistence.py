"""transformers knows an optional package of kernels from the hub, by the name that ours has too."""

import transformers.models.llama.modeling_llama
from transformers.utils.import_utils import is_kernels_available

import kernels.contract


def test_our_kernels_are_not_taken_for_the_hubs() -> None:
    """transformers asks for the installed distribution `kernels`, which ours (twostroke) is not, and never must be."""
    assert not is_kernels_available()
    assert kernels.contract.QUANT_MAX == 127
    assert transformers.models.llama.modeling_llama.LlamaRMSNorm.__module__.startswith("transformers.")
