"""Times the integer products of SmolLM2's layers, every kernel that this CPU can run beside oneDNN's: taking turns.

The machine may be shared: times are the least of all rounds, ratios the medians of each round's.
`python -m bench.products_bench`; JSON out.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from common.config import cache_dir
from kernels.cpu.int8_pack import pack_weight
from kernels.cpu.setup import compiled_code_kept_in

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]  # inputs, outputs
NUMS_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512]
ZERO_POINT = 128
Product = Callable[[], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.products_bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on each line of figures")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=NUMS_ROWS)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    lines = []
    for depth, num_outputs in SHAPES:
        values = torch.randint(-127, 128, (num_outputs, depth), dtype=torch.int8)
        for num_rows in options.rows:
            products = _products(values, num_rows)
            for num_threads in options.threads:
                torch.set_num_threads(num_threads)
                shape = {"shape": f"{depth} -> {num_outputs}", "rows": num_rows, "threads": num_threads}
                lines.append(shape | _measure(products, depth * num_outputs * num_rows, options.seconds))
                print(lines[-1], file=sys.stderr)
    print(json.dumps({"timings": lines}, indent=1))
    return 0


def _products(values: torch.Tensor, num_rows: int) -> dict[str, Product]:
    with compiled_code_kept_in(cache_dir()):
        from kernels.cpu.int8_matmul import KERNELS, load_kernel, why_unusable
        from kernels.cpu.int8_ops import int8_product
        from kernels.cpu.pool import HelperPool

        kernels = {name: load_kernel(name) for name in KERNELS if why_unusable(name) is None}
    scales = torch.ones(values.shape[0])
    rows = torch.randint(0, 256, (num_rows, values.shape[1]), dtype=torch.uint8)
    run = HelperPool().run
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    zero_points = torch.zeros(values.shape[0], dtype=torch.int32)
    onednn: Product = partial(
        torch.ops.onednn.qlinear_pointwise.default,
        *(rows, 1.0, ZERO_POINT, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""),
    )
    return {"onednn": onednn} | {
        # Each has weights of its own: none finds them in the cache because another has just read them.
        name: partial(int8_product, run, rows, pack_weight(values, scales), kernel=kernel)
        for name, kernel in kernels.items()
    }


def _measure(products: dict[str, Product], num_macs: int, seconds: float) -> dict[str, float]:
    """The least microseconds of each, its MACs per second, and the median ratio of oneDNN's time to its own."""
    times: dict[str, list[float]] = {name: [] for name in products}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["onednn"]) < 3:
        for name, product in products.items():
            started = time.perf_counter()
            product()
            times[name].append(time.perf_counter() - started)
    figures: dict[str, float] = {}
    for name, samples in times.items():
        figures[f"{name}_us"] = round(1e6 * min(samples), 1)
        figures[f"{name}_gmac_per_s"] = round(num_macs / min(samples) / 1e9, 1)
        if name != "onednn":
            ratios = [a / b for a, b in zip(times["onednn"], samples, strict=True)]
            figures[f"onednn_time_over_{name}"] = round(median(ratios), 2)
    return figures


if __name__ == "__main__":
    sys.exit(main())
