"""Which engines take part: Twostroke's variants and the peers, installed; and why others do not."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers import servers
from bench.peers.environments import PEERS, CannotInstall, ensure, python_of, release_of
from bench.peers.model import default_gguf, hugging_face_folder, openvino_model
from bench.peers.servers import Client, Command, Engine, InProcess, Server

HERE = Path(__file__).parent


@dataclass
class Lineup:
    """`stop` is due once it is made."""

    ours: dict[str, Engine] = field(default_factory=dict)
    peers: dict[str, Engine] = field(default_factory=dict)
    releases: dict[str, str] = field(default_factory=dict)  # engine -> release or options
    absent: dict[str, str] = field(default_factory=dict)  # peer -> why
    client: Client | None = None

    @property
    def engines(self) -> dict[str, Engine]:
        return {**self.ours, **self.peers}

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.stop()
        if self.client is not None:
            self.client.stop()


def line_up(root: Path, variants: Sequence[str], peers: Sequence[str]) -> Lineup:
    """`variants`: options of `twostroke up`, one string each. Raises CannotInstall where the client cannot be."""
    logs = root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    gguf = default_gguf()
    folder = hugging_face_folder(gguf, root / "model")
    _say("installing what is not there yet: vllm (the client)")
    vllm_home = ensure(PEERS["vllm"], root)
    argv = (str(python_of(vllm_home)), str(HERE / "client_driver.py"), "--tokenizer", str(folder))
    lineup = Lineup(client=Client(Command(argv), logs / "client.log"))
    assert lineup.client is not None
    for index, options in enumerate(variants):
        name = "twostroke" if len(variants) == 1 else f"twostroke {index + 1}"
        lineup.releases[name] = f"up {options}".strip()
        command = servers.twostroke(sys.executable, options.split())
        lineup.ours[name] = Server(name, command, lineup.client, logs / f"{_file_name(name)}.log")
    for name in peers:
        _add_peer(lineup, name, root, gguf, folder)
    return lineup


def _add_peer(lineup: Lineup, name: str, root: Path, gguf: Path, folder: Path) -> None:
    assert lineup.client is not None
    peer, log = PEERS[name], root / "logs" / f"{name}.log"
    cores = sorted(os.sched_getaffinity(0))
    try:
        _say(f"installing what is not there yet: {name}")
        home = ensure(peer, root)
        model = openvino_model(home, folder, root / "openvino-model") if name == "openvino" else gguf
    except CannotInstall as why:
        lineup.absent[name] = f"cannot be installed here: {why}"
        return
    if name == "openvino":
        driver = HERE / "openvino_driver.py"
        lineup.peers[name] = InProcess(servers.openvino(home, driver, model, len(cores)), log)
    elif name == "llamacpp":
        lineup.peers[name] = Server(name, servers.llamacpp(home, model, len(cores)), lineup.client, log)
    else:
        lineup.peers[name] = Server(name, servers.vllm(home, folder, cores), lineup.client, log)
    lineup.releases[name] = f"{peer.package} {release_of(peer)}"


def _file_name(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
