"""Reads recorded traces: Mooncake's JSONL and `timestamp,input,output` CSV. Pure: text in, Trace out."""

import csv
import json
from collections.abc import Iterable, Iterator
from typing import Any

from bench.replay.trace import Arrivals, PlannedRequest, Segment, Trace
from common.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


def read_mooncake(lines: Iterable[str], *, seed: int = 0) -> Trace:
    """One object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one for each
    512 tokens of the prompt, the last of which may be partial. Raises ConfigError naming the line.
    """
    requests = [_mooncake_request(number, line) for number, line in _numbered(lines)]
    return _recorded(seed, requests)


def read_csv(lines: Iterable[str], *, seed: int = 0) -> Trace:
    """`timestamp` (s), `input`, `output` (tokens), with or without a heading. Prompts share nothing."""
    requests = []
    for number, line in _numbered(lines):
        row = next(csv.reader([line]))
        if number == 1 and row[0].strip().lower() == "timestamp":
            continue
        try:
            timestamp, num_input, num_output = float(row[0]), int(row[1]), int(row[2])
        except (ValueError, IndexError) as error:
            raise _bad_line(number, line, "timestamp,input,output") from error
        requests.append(_request(number, timestamp, num_output, (Segment(f"request/{number}", num_input),)))
    return _recorded(seed, requests)


def _mooncake_request(number: int, line: str) -> PlannedRequest:
    try:
        entry: dict[str, Any] = json.loads(line)
        length, hash_ids = int(entry["input_length"]), [int(value) for value in entry["hash_ids"]]
        timestamp, num_output = float(entry["timestamp"]) / 1000, int(entry["output_length"])
    except (ValueError, KeyError, TypeError) as error:
        raise _bad_line(number, line, "timestamp, input_length, output_length and hash_ids") from error
    if len(hash_ids) != -(-length // MOONCAKE_BLOCK_TOKENS):
        raise ConfigError(
            f"line {number} of the trace has {length} prompt tokens and {len(hash_ids)} hash_ids; "
            f"it must have one for each {MOONCAKE_BLOCK_TOKENS} tokens"
        )
    sizes = (min(MOONCAKE_BLOCK_TOKENS, length - start) for start in range(0, length, MOONCAKE_BLOCK_TOKENS))
    segments = (Segment(f"block/{hash_id}", size) for hash_id, size in zip(hash_ids, sizes, strict=True))
    return _request(number, timestamp, num_output, tuple(segments))


def _request(number: int, timestamp: float, num_output: int, segments: tuple[Segment, ...]) -> PlannedRequest:
    request = PlannedRequest(timestamp, num_output, segments)
    if request.num_input_tokens < 1 or num_output < 1:
        raise ConfigError(
            f"line {number} of the trace has {request.num_input_tokens} prompt and {num_output} output tokens; "
            "each must be at least 1"
        )
    return request


def _recorded(seed: int, requests: list[PlannedRequest]) -> Trace:
    if not requests:
        raise ConfigError("the trace file has no request; give one with at least one line")
    start = min(request.arrival_s for request in requests)
    shifted = (
        PlannedRequest(round(request.arrival_s - start, 6), request.num_output_tokens, request.segments)
        for request in requests
    )
    return Trace(seed, Arrivals.RECORDED, None, tuple(sorted(shifted, key=lambda request: request.arrival_s)))


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _bad_line(number: int, line: str, expected: str) -> ConfigError:
    return ConfigError(f"line {number} of the trace is {line.strip()[:80]!r}; it must have {expected}")
