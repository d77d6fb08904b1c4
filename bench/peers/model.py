"""The default model in the forms that peers read: its GGUF file as it is, a Hugging Face folder made from it, and
OpenVINO's int8 form made from that."""

import os
import shutil
from pathlib import Path

from bench.peers.environments import checked, python_of
from common.model.source import resolve_source

READY = "config.json"  # written last


def default_gguf() -> Path:
    return resolve_source("").path


def hugging_face_folder(gguf: Path, folder: Path) -> Path:
    """bf16 weights, the configuration and the tokenizer as transformers reads them from the file; made once."""
    if (folder / READY).exists():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name.startswith("lm_head."))
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors", 0o644)
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    if hasattr(model.config, "quantization_config"):  # of the file, not of what was written here
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    return folder


def openvino_model(home: Path, source: Path, folder: Path) -> Path:
    """int8 weights per channel: against the 4-bit ones of the GGUF file faster in batches, about as fast alone. Made
    once, by the peer's own converter in its environment `home`. Raises CannotInstall."""
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        export = (str(python_of(home)), "-m", "optimum.commands.optimum_cli", "export", "openvino")
        options = ("--weight-format", "int8", "--task", "text-generation-with-past")
        checked([*export, "--model", str(source), *options, str(unfinished)], {"HF_HUB_OFFLINE": "1"})
        unfinished.rename(folder)
    return folder
