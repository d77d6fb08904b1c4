"""`twostroke drain`: a worker takes no new work, ends what it has, and exits with 0; done through the gateway."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from cli.ask import refusal
from cli.errors import CommandError
from cli.progress import Progress

POLL_S = 0.2
REQUEST_TIMEOUT_S = 15.0
MARGIN_S = 10.0
"""Beside the drain itself: last messages, the last spans, and the gateway's noticing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", help="its id, such as decode-0, or its address")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the gateway listens")
    parser.add_argument("--key-file", metavar="FILE", help="the operator's key, where the gateway has one")
    parser.add_argument("--force", action="store_true", help="also when no other decode worker takes work")
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="do not wait until the worker is gone")


def run(arguments: argparse.Namespace) -> int:
    progress = Progress(sys.stdout)
    headers = {}
    if arguments.key_file is not None:
        headers["authorization"] = f"Bearer {Path(arguments.key_file).read_text().strip()}"
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        drained = _drain(client, arguments.worker, arguments.force)
        name, grace_s = f"{drained['id']} at {drained['address']}", drained["grace_s"]
        progress.step(f"{name} drains: {drained['num_sequences']} requests there, at most {grace_s:g} s")
        if arguments.wait:
            _await_end(client, drained, time.monotonic() + grace_s + MARGIN_S)
            progress.step(f"{name} is gone")
    return 0


def _drain(client: httpx.Client, worker: str, force: bool) -> dict[str, Any]:
    path = f"/operations/workers/{quote(worker, safe='')}/drain"
    return _answer(client, "PUT", path, {"force": "true"} if force else {})


def _await_end(client: httpx.Client, drained: dict[str, Any], give_up_s: float) -> None:
    """Until no worker with the drained one's incarnation is connected: what comes after it is another."""
    while time.monotonic() < give_up_s:
        listed = _answer(client, "GET", "/operations/workers", {})["workers"]
        if not any(w["incarnation"] == drained["incarnation"] and w["state"] == "ready" for w in listed):
            return
        time.sleep(POLL_S)
    raise CommandError(f"{drained['id']} is still there, past its grace period; its log may say why")


def _answer(client: httpx.Client, method: str, path: str, parameters: dict[str, str]) -> dict[str, Any]:
    """Raises CommandError with what the gateway said."""
    try:
        response = client.request(method, path, params=parameters)
    except httpx.HTTPError as error:
        raise CommandError(f"{client.base_url}: {error or type(error).__name__}; is a stack running there?") from None
    if response.status_code != httpx.codes.OK:
        raise CommandError(refusal(response.status_code, response.text))
    answer: dict[str, Any] = response.json()
    return answer
