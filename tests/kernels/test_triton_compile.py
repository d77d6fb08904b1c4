"""Without a GPU: the launches compile for sm_90, with the compiler inside triton, and its lack is named."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.ops import select
from kernels.triton import attention, kv_write, norm
from tests.support.paged_kv import PagedKV

SHARED_MEMORY_BYTES = 227 * 1024  # most that a program may take on sm_90

# Batches as (sequence, context length, query length): decode in one partition and in several, chunks, a mixture.
BATCHES = [[(0, 16, 1)], [(0, 300, 1), (1, 17, 5)], [(2, 600, 600)], [(2, 700, 1), (1, 20, 20), (0, 300, 2)]]


class Sm90Driver:
    """As much of a GPU's driver as a launch asks for before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    """Stands in for a kernel where it is launched: compiles it for the arguments as a launch does, and stops there."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.variants: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self._kernel.warmup(*arguments, grid=grid, **options)
            self.variants[compiled.hash] = compiled

        return launch


def resource_usage(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128)])
def test_launches_compile_for_sm_90(
    num_heads: int, num_kv_heads: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(type(driver), "active", Sm90Driver())
    kernels = {}
    for module, name in (
        (attention, "attend_kernel"),
        (attention, "fold_kernel"),
        (kv_write, "write_kv_kernel"),
        (norm, "rms_norm_kernel"),
    ):
        kernels[name] = CompileOnly(getattr(module, name))
        monkeypatch.setattr(module, name, kernels[name])

    paged = PagedKV(num_kv_heads, head_dim, block_size=16, capacities=[300, 20, 700], seed=0)
    for rows in BATCHES:
        batch = paged.batch(rows)
        num_tokens = int(batch.query_start[-1])
        q, k, v = (torch.zeros(num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
        kv_write.write_kv(k, v, paged.layer, batch.slot_mapping, torch.zeros(num_tokens, dtype=torch.int32))
        for window in (0, 64):
            attention.paged_attention(q, paged.layer, batch, head_dim**-0.5, window)
        norm.rms_norm(q.flatten(1), torch.ones(num_heads * head_dim), 1e-5)

    for name, kernel in kernels.items():
        # Whatever the batch, the same machine code: nothing compiles during a request, and a row keeps its arithmetic.
        (compiled,) = kernel.variants.values()
        check_machine_code(name, compiled, tmp_path)


def check_machine_code(name: str, compiled: Any, folder: Path) -> None:
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    usage = resource_usage(compiled.asm["cubin"], folder)
    assert "STACK:0 " in usage, f"{name}: registers spill: {usage}"
    assert "fma.rn.f32" not in ptx  # the two kernels fold alike only if every operation rounds on its own
    if name == "attend_kernel":
        assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in ptx
    if name == "write_kv_kernel":
        assert "div.rn.f32" in ptx
        assert "div.full.f32" not in ptx


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_machine_without_a_gpu_is_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"'triton' needs a CUDA device that torch sees; the device is {device}"):
        select(torch.device(device), "triton")
