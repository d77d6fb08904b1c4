"""Puts a worker's model together: files, kernels, weights, KV pool, runner. Both services load theirs here.

No network. What it cannot serve raises ModelLoadError or ConfigError, which say what and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError, ModelLoadError
from common.kv.cache import KVCache
from common.kv.layout import KVFormat, KVLayout
from common.model.batch import ScheduledTokens
from common.model.compiled_transformer import CompiledTransformer
from common.model.config import ModelConfig
from common.model.identity import fingerprint, narrower_fingerprints
from common.model.linear import Numerics, auto_numerics, exactness
from common.model.loading import prepare_model
from common.model.model_cache import Progress
from common.model.prepared import PreparedModel
from common.model.quantized_model import load_quantized
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from common.model.transformer import ForwardPass, Transformer
from common.model.weights import load_weights
from common.sampling import SamplingParams
from kernels.ops import Ops, select
from kernels.step import StepCompiler

AUTO = "auto"
_WARM_UP_TOKENS = 64
_WARM_UP_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    prepared: PreparedModel
    config: ModelConfig
    layout: KVLayout
    numerics: Numerics
    fingerprint: bytes  # 32 bytes
    narrower_fingerprints: Mapping[KVFormat, bytes]  # with each narrower KV format that blocks can be sent in
    runner: ModelRunner
    ops: Ops
    max_model_len: int  # prompt and output tokens together

    @property
    def exact(self) -> bool:
        return exactness(self.numerics, self.ops.name)[0]

    @property
    def inexact_reason(self) -> str:
        """Empty when exact."""
        return exactness(self.numerics, self.ops.name)[1]

    @property
    def num_blocks(self) -> int:
        return self.runner.cache.num_blocks

    def warm_up(self) -> None:
        """Runs the real path on the shapes of a prompt, a decode step and a mixed step, sampled both ways.

        Precondition: nobody owns a block yet. What it writes is overwritten by the blocks' owners.
        """
        prompt_len = min(_WARM_UP_TOKENS, self.max_model_len - 1, self.num_blocks * self.layout.block_size - 1)
        whole = range(self.layout.num_blocks(prompt_len + 1))
        self._run(ScheduledTokens([0] * prompt_len, 0, whole, 1))
        self._run(ScheduledTokens([0], prompt_len, whole, 1))
        num_short = min(_WARM_UP_SEQUENCES, self.num_blocks)
        lengths = [1 + i % self.layout.block_size for i in range(num_short)]
        self._run(*(ScheduledTokens([0] * length, 0, [i], 1) for i, length in enumerate(lengths)))

    def _run(self, *scheduled: ScheduledTokens) -> None:
        logits = self.runner.run(scheduled).logits
        for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, num_logprobs=1)):
            sample(logits, [SampleRow(params, 0, (), ())] * logits.shape[0])


@dataclass(frozen=True, slots=True)
class LoadedForwardPass:
    forward_pass: ForwardPass
    numerics_name: str  # the numeric path with everything that the values of K and V depend on


def load_model(
    *,
    source: str,
    cache_dir: Path,
    device: str,
    backend: str,
    numerics: str,
    kv_format: KVFormat,
    block_size: int,
    kv_memory_bytes: int,
    max_model_len: int | None,
    progress: Progress,
) -> LoadedModel:
    """`source` as in `prepare_model`; `device` "auto", "cpu" or "cuda"; `backend` as in `kernels.ops.select`;
    `numerics` "auto" or a value of `Numerics`.

    `cache_dir` keeps prepared models and compiled kernels. The KV pool takes at most `kv_memory_bytes`.
    `max_model_len` lowers what the model allows (none: all of it); a pool that holds less lowers it too.
    `progress` gets a line for each long step.
    """
    on_device = _resolve_device(device)
    prepared = prepare_model(source, cache_dir, progress)
    config = prepared.config
    layout = KVLayout(kv_format, block_size, config.num_layers, config.num_kv_heads, config.head_dim)
    num_blocks = _pool_blocks(layout, kv_memory_bytes)
    served_len = _served_len(config, max_model_len, num_blocks * block_size, progress)
    ops = _select_ops(on_device, backend, cache_dir)
    numeric_path = _resolve_numerics(numerics, ops)
    progress(f"loading {prepared.name} on {ops.description}")
    loaded = load_transformer(prepared, cache_dir, ops, on_device, numeric_path, served_len, progress)
    return LoadedModel(
        prepared=prepared,
        config=config,
        layout=layout,
        numerics=numeric_path,
        fingerprint=fingerprint(prepared, layout, loaded.numerics_name),
        narrower_fingerprints=narrower_fingerprints(prepared, layout, loaded.numerics_name),
        runner=ModelRunner(loaded.forward_pass, _make_cache(layout, num_blocks, on_device)),
        ops=ops,
        max_model_len=served_len,
    )


def load_transformer(
    prepared: PreparedModel,
    cache_dir: Path,
    ops: Ops,
    device: torch.device,
    numerics: Numerics,
    max_model_len: int | None,
    progress: Progress,
) -> LoadedForwardPass:
    """The model on its numeric path: rotated and quantized where activations are, which `cache_dir` keeps; compiled
    as a whole where the backend can."""
    if numerics is Numerics.REFERENCE:
        weights = load_weights(prepared, device)
        plain = Transformer(prepared.config, weights, ops, device, numerics, max_model_len)
        return LoadedForwardPass(plain, numerics.value)
    quantized = load_quantized(prepared, cache_dir, device, progress)
    rotated = quantized.rotated
    for reason in rotated.skipped:
        progress(f"not rotated: {reason}")
    name = f"{numerics}-{quantized.name}"
    if isinstance(ops, StepCompiler):
        progress(f"products: {ops.product_description}")
        compiled = CompiledTransformer(rotated.config, rotated.weights, ops, max_model_len, rotated.down_block)
        return LoadedForwardPass(compiled, name)
    progress("products: fp32 products of integers, for this backend has none of its own")
    transformer = Transformer(rotated.config, rotated.weights, ops, device, numerics, max_model_len, rotated.down_block)
    return LoadedForwardPass(transformer, name)


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; allowed: auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and torch sees no GPU; install a CUDA build of torch, or use cpu")
    return torch.device(device)


def _select_ops(device: torch.device, backend: str, cache_dir: Path) -> Ops:
    try:
        return select(device, backend, cache_dir)
    except ValueError as error:  # kernels know nothing of our errors
        raise ConfigError(str(error)) from error


def _resolve_numerics(numerics: str, ops: Ops) -> Numerics:
    if numerics == AUTO:
        return auto_numerics(ops.name)
    try:
        return Numerics(numerics)
    except ValueError:
        raise ConfigError(f"numerics is {numerics!r}; allowed: {AUTO}, {', '.join(Numerics)}") from None


def _pool_blocks(layout: KVLayout, kv_memory_bytes: int) -> int:
    num_blocks = kv_memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ModelLoadError(
            f"the KV cache may take {kv_memory_bytes} bytes, and one block of this model takes {layout.block_bytes} "
            f"({layout.describe()}); give it more memory"
        )
    return num_blocks


def _served_len(config: ModelConfig, max_model_len: int | None, pool_tokens: int, progress: Progress) -> int:
    wanted = config.max_model_len if max_model_len is None else max_model_len
    if wanted > config.max_model_len:
        raise ConfigError(f"max_model_len is {wanted}; {config.name} was made for {config.max_model_len} positions")
    if wanted > pool_tokens and max_model_len is not None:
        raise ModelLoadError(
            f"max_model_len is {wanted}, and the KV cache holds {pool_tokens} tokens; give it more memory, "
            "or lower max_model_len"
        )
    if wanted > pool_tokens:
        progress(f"the KV cache holds {pool_tokens} tokens: requests may have that many, not {wanted}")
    served = min(wanted, pool_tokens)
    if served < 2:
        raise ModelLoadError(f"the KV cache holds {pool_tokens} tokens; a request has at least 2; give it more memory")
    return served


def _make_cache(layout: KVLayout, num_blocks: int, device: torch.device) -> KVCache:
    try:
        return KVCache(layout, num_blocks, device)
    except (RuntimeError, MemoryError) as error:  # so torch says that memory is short, and NumPy
        raise ModelLoadError(f"no room for a KV cache of {num_blocks * layout.block_bytes} bytes: {error}") from None
