"""What a peer is started with and where: nothing of the checkout may reach it; and its installation's last step."""

import json
import sys
from pathlib import Path

import pytest

from bench.peers.drivers import Command, Driver
from bench.peers.environments import PEERS, restore_links

# Says what it sees instead of doing the job.
SHOWS = """
import json, os, sys
print("ready", flush=True)
sys.stdin.readline()
seen = float("PYTHONPATH" in os.environ) + 2.0 * (os.getcwd() == sys.argv[1])
figures = {"median_ttft_ms": seen, "median_tpot_ms": 1, "output_throughput": 1, "completed": 1}
print(json.dumps(figures | {"total_output_tokens": 1}), flush=True)
"""
JOB = {"num_requests": 1, "num_output_tokens": 1}


@pytest.mark.parametrize("of_checkout", [True, False])
def test_only_our_own_processes_see_the_checkout(
    of_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    command = Command((sys.executable, "-c", SHOWS, str(Path.cwd())), of_checkout=of_checkout)
    driver = Driver(command, tmp_path / "log")
    try:
        driver.wait_ready()
        assert driver.run(JOB, timeout_s=60.0).ttft_ms == (3.0 if of_checkout else 0.0)
    finally:
        driver.stop()


def test_links_between_libraries_are_restored_and_may_be_again(tmp_path: Path) -> None:
    (tmp_path / "libx.so.1.0").write_text("code")
    listed = tmp_path / "_symlinks.json"
    listed.write_text(json.dumps({"libx.so": "libx.so.1", "libx.so.1": "libx.so.1.0"}))
    for _ in range(2):
        restore_links(listed)
        assert (tmp_path / "libx.so").read_text() == "code"


def test_what_has_no_wheels_is_built_for_this_machine() -> None:
    flags = PEERS["llamacpp"].build_flags
    assert flags is not None
    assert "-DGGML_NATIVE=ON" in flags
