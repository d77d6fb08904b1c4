"""Which engines take part: Twostroke's variants and the peers, installed; and why others do not."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers import servers
from bench.peers.drivers import Command
from bench.peers.environments import PEERS, CannotInstall, ensure, python_of, release_of
from bench.peers.model import default_gguf, hugging_face_folder, openvino_model
from bench.peers.servers import Client, Engine, InProcess, Server

HERE = Path(__file__).parent
OPENVINO_INT8, OPENVINO_GGUF, LLAMACPP = "openvino-int8", "openvino-gguf", "llamacpp"
VLLM, VLLM_EAGER = "vllm", "vllm-eager"

# engine -> its environment, and the form of the model that it computes with
ENGINES = {
    OPENVINO_INT8: ("openvino", "int8 weights per channel"),
    OPENVINO_GGUF: ("openvino", "the GGUF file, Q4_1"),
    LLAMACPP: ("llamacpp", "the GGUF file, Q4_1"),
    VLLM: ("vllm", "bf16"),
    VLLM_EAGER: ("vllm", "bf16, not compiled"),
}
DEFAULT_ENGINES = [name for name in ENGINES if name != VLLM_EAGER]


@dataclass
class Lineup:
    """`stop` is due once it is made."""

    ours: dict[str, Engine] = field(default_factory=dict)
    peers: dict[str, Engine] = field(default_factory=dict)
    releases: dict[str, str] = field(default_factory=dict)  # engine -> release and form, or options
    absent: dict[str, str] = field(default_factory=dict)  # engine -> why
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
    """`variants`: options of `twostroke up`, one string each. `peers`: of ENGINES. Raises CannotInstall where the
    client cannot be."""
    logs = root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    gguf = default_gguf()
    folder = hugging_face_folder(gguf, root / "model")
    _say("installing what is not there yet: vllm (the client)")
    vllm_home = ensure(PEERS["vllm"], root)
    argv = (str(python_of(vllm_home)), str(HERE / "client_driver.py"), "--tokenizer", str(folder))
    client = Client(Command(argv), logs / "client.log")
    lineup = Lineup(client=client)
    for index, options in enumerate(variants):
        name = "twostroke" if len(variants) == 1 else f"twostroke {index + 1}"
        lineup.releases[name] = f"up {options}".strip()
        command = servers.twostroke(sys.executable, options.split())
        lineup.ours[name] = Server(name, command, client, logs / f"{_file_name(name)}.log")
    for name in peers:
        _add_peer(lineup, client, name, root, gguf, folder)
    return lineup


def _add_peer(lineup: Lineup, client: Client, name: str, root: Path, gguf: Path, folder: Path) -> None:
    environment, form = ENGINES[name]
    peer = PEERS[environment]
    try:
        _say(f"installing what is not there yet: {name}")
        lineup.peers[name] = _engine(name, ensure(peer, root), client, root, gguf, folder)
    except CannotInstall as why:
        lineup.absent[name] = f"cannot be installed here: {why}"
    else:
        lineup.releases[name] = f"{peer.package} {release_of(peer)}, {form}"


def _engine(name: str, home: Path, client: Client, root: Path, gguf: Path, folder: Path) -> Engine:
    log, cores = root / "logs" / f"{name}.log", sorted(os.sched_getaffinity(0))
    if name in (OPENVINO_INT8, OPENVINO_GGUF):
        model = gguf if name == OPENVINO_GGUF else openvino_model(home, folder, root / "openvino-model")
        return InProcess(servers.openvino(home, HERE / "openvino_driver.py", model, len(cores)), log)
    if name == LLAMACPP:
        return Server(name, servers.llamacpp(home, gguf, len(cores)), client, log)
    options = ["--enforce-eager"] if name == VLLM_EAGER else []
    return Server(name, servers.vllm(home, folder, cores, root / "vllm-cache", options), client, log)


def _file_name(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
