"""Runs works on a server by the load generator of vLLM (`vllm bench serve`): no part of Twostroke measures here.

Runs in the environment of vLLM and imports nothing of this project; one process for all works, since importing it takes
many seconds. Speaks as `openvino_driver` does; its jobs have the server's `url` and `model` too.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

KEPT = ("median_ttft_ms", "median_tpot_ms", "output_throughput", "completed", "total_output_tokens")


def _arguments(job: dict[str, Any], tokenizer: str) -> list[str]:
    return [
        *("--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", job["url"], "--model", job["model"], "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--random-range-ratio", "0", "--seed", str(job["seed"])),
        *("--random-input-len", str(job["num_input_tokens"]), "--random-output-len", str(job["num_output_tokens"])),
        *("--num-prompts", str(job["num_requests"]), "--max-concurrency", str(job["concurrency"])),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm"),
        # llama.cpp's server drops connections that are kept for the next request, and with them the request.
        *("--header", "Connection=close"),
        # The check for readiness would send the first prompt twice: a prefix hit for those who cache.
        *("--ready-check-timeout-sec", "0"),
    ]


def _run(parser: Any, job: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(sys.stderr):
        result = asyncio.run(main_async(parser.parse_args(_arguments(job, tokenizer))))
    return {name: result[name] for name in KEPT}


def main() -> None:
    own = argparse.ArgumentParser()
    own.add_argument("--tokenizer", required=True)
    tokenizer = own.parse_args().tokenizer
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(parser, json.loads(line), tokenizer)), flush=True)


if __name__ == "__main__":
    main()
