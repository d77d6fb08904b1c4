"""The first question to a fresh stack: asked through the public API, shown as it streams, its time taken apart."""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

from cli.ask import Answer, Endpoint
from cli.config import spans_dir
from cli.errors import CommandError
from cli.waterfall import draw_latency, request_span
from common.config import TraceDestination, trace_destination
from common.telemetry import names
from common.telemetry.span_file import read_spans

QUESTION = "Write a haiku about the sea."
SPANS_TIMEOUT_S = 10.0
SPANS_RETRY_S = 0.1


async def ask_first_question(url: str) -> None:
    """CommandError when no whole answer comes, or when its trace does not."""
    async with Endpoint(url) as endpoint:
        model = await endpoint.model()
        print(f"\nQuestion to {model}: {QUESTION}\nAnswer: ", end="", flush=True)
        answer = await _show(endpoint, model)
    if not answer.usage.get("completion_tokens"):
        raise CommandError("the answer is empty")
    destination = trace_destination()
    if destination is not TraceDestination.LOCAL_FILE:
        print(f"\nWhere the time went is not on file here: spans go to {destination} (OTEL_* variables).", flush=True)
        return
    attributes = await _request_attributes(answer.response_id)
    print("\nWhere the time went, as the gateway saw it:")
    print("\n".join(f"  {line}" for line in draw_latency(attributes)), flush=True)


async def _show(endpoint: Endpoint, model: str) -> Answer:
    answer = Answer()
    question = [{"role": "user", "content": QUESTION}]
    asked = time.monotonic()
    first_text_s = None
    async for text in endpoint.stream(question, answer, model=model, max_tokens=96, temperature=0, seed=0):
        first_text_s = first_text_s or time.monotonic() - asked
        sys.stdout.write(text)
        sys.stdout.flush()
    if first_text_s is not None:
        print(f"\n\nFirst text after {first_text_s:.3f} s, all of it after {time.monotonic() - asked:.3f} s.")
    return answer


async def _request_attributes(response_id: str) -> Mapping[str, Any]:
    """Spans reach their file a moment after the answer's end."""
    try:
        async with asyncio.timeout(SPANS_TIMEOUT_S):
            while True:
                spans = (
                    span
                    for span in read_spans(spans_dir())
                    if span.attributes.get(names.ATTR_RESPONSE_ID) == response_id
                )
                if request := request_span(spans):
                    return request.attributes
                await asyncio.sleep(SPANS_RETRY_S)
    except TimeoutError:
        raise CommandError(f"the request {response_id} left no span in {spans_dir()}") from None
