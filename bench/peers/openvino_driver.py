"""Runs works on OpenVINO GenAI's continuous batching in this process: no HTTP, no client, which flatters it.

Runs in the peer's own environment and imports nothing of this project. The first line of its output says that it is
ready; then for each job, one line of JSON on standard input, it writes one line: the figures of that job.
"""

import argparse
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40_000  # clear of SmolLM2's special tokens


@dataclass
class Asked:
    handle: Any
    sent_s: float
    event_times_s: list[float] = field(default_factory=list)


class Driver:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._num_asked = 0

    def run(self, job: dict[str, int]) -> dict[str, float]:
        """Keeps `concurrency` requests in the pipeline until `num_requests` are done."""
        waiting, running, done = deque(_prompts(job)), list[Asked](), list[Asked]()
        config = openvino_genai.GenerationConfig(
            max_new_tokens=job["num_output_tokens"], ignore_eos=True, do_sample=False
        )
        started_s = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < job["concurrency"]:
                running.append(self._ask(waiting.popleft(), config))
            self._pipeline.step()
            now_s = time.perf_counter()
            for asked in running:
                _note_tokens(asked, now_s)
            done += [asked for asked in running if len(asked.event_times_s) >= job["num_output_tokens"]]
            running = [asked for asked in running if len(asked.event_times_s) < job["num_output_tokens"]]
        return _figures(done, time.perf_counter() - started_s)

    def _ask(self, prompt: "np.ndarray", config: Any) -> Asked:
        self._num_asked += 1
        sent_s = time.perf_counter()
        return Asked(self._pipeline.add_request(self._num_asked, ov.Tensor(prompt), config), sent_s)


def _prompts(job: dict[str, int]) -> "list[np.ndarray]":
    draw = np.random.default_rng(job["seed"])
    shape = (1, job["num_input_tokens"])
    return [draw.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, shape, np.int64) for _ in range(job["num_requests"])]


def _note_tokens(asked: Asked, now_s: float) -> None:
    if asked.handle.can_read():
        for output in asked.handle.read().values():
            asked.event_times_s += [now_s] * len(output.generated_ids)


def _figures(done: list[Asked], duration_s: float) -> dict[str, float]:
    times = [asked.event_times_s for asked in done]
    return {
        "median_ttft_ms": 1000 * median(asked.event_times_s[0] - asked.sent_s for asked in done),
        "median_tpot_ms": 1000 * median((events[-1] - events[0]) / (len(events) - 1) for events in times),
        "output_throughput": sum(len(events) for events in times) / duration_s,
        "completed": len(done),
        "total_output_tokens": sum(len(events) for events in times),
    }


def _pipeline(given: argparse.Namespace) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = given.cache_gib
    scheduler.max_num_batched_tokens = given.max_num_batched_tokens
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": given.threads} | dict(each.split("=", 1) for each in given.property)
    return openvino_genai.ContinuousBatchingPipeline(
        given.model, scheduler_config=scheduler, device="CPU", properties=properties
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--property", action="append", default=[])
    driver = Driver(_pipeline(parser.parse_args()))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(driver.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
