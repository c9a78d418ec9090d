"""run: a net's private inference by two processes of a real engine on this machine, measured."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fastbcd.graph.trace import logits_of
from fastbcd.private.artefact import artefact_of, compared
from fastbcd.private.costs import OWNERS, Cost, cost
from fastbcd.private.two_party.artefact import Artefact
from fastbcd.private.units import columns, si
from fastbcd.runtime.dtypes import device_of
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.validate import check_choice

HERE = Path(__file__).parent
CLONE = HERE.parent.parent
SIMULATED = "dealer is party 0: a simulation, not private"


class EngineInfo(NamedTuple):
    """What is known of an engine before it runs."""

    package: str
    version: str
    folder: str  # of its environment
    trust: str
    install: tuple[str, ...]  # commands


SPU = EngineInfo(
    package="spu",
    version="0.9.5",
    folder=".venv-spu",
    trust="two-party, semi-honest",
    install=(
        "python3.11 -m venv .venv-spu",
        ".venv-spu/bin/python -m pip install spu==0.9.5 jax==0.4.34 jaxlib==0.4.34 "
        "numpy==1.26.4 safetensors==0.8.0",
    ),
)
CRYPTEN = EngineInfo(
    package="crypten",
    version="0.4.1",
    folder=".venv-crypten",
    trust=SIMULATED,
    install=(
        "python3.11 -m venv .venv-crypten",
        ".venv-crypten/bin/python -m pip install torch==2.13.0 numpy safetensors==0.8.0 "
        "omegaconf onnx pyyaml future pandas scipy",
        ".venv-crypten/bin/python -m pip install --no-deps crypten==0.4.1",
    ),
)
ENGINES = {
    "spu-cheetah": SPU,
    "spu-semi2k": SPU._replace(trust=SIMULATED),
    "crypten": CRYPTEN,
}


class Place(NamedTuple):
    """Where a party runs: its address, and a command that others are run by, such as nsenter."""

    host: str = "127.0.0.1"
    command: tuple[str, ...] = ()


HERE_BOTH = (Place(), Place())


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a layer, or all of an inference, took, as the client counts it.

    >>> part = Measured(layer="fc", sent=80, received=40, messages_sent=1, messages_received=2,
    ...              seconds=0.5)
    >>> part.bytes, part.messages
    (120, 2)
    """

    layer: str
    sent: int = 0  # bytes
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Both directions together."""
        return self.sent + self.received

    @property
    def messages(self) -> int:
        """Each way: the larger number."""
        return max(self.messages_sent, self.messages_received)

    @classmethod
    def total(cls, parts: Sequence[Measured], layer: str = "total") -> Measured:
        """The sum."""
        return cls(
            layer=layer,
            sent=sum(part.sent for part in parts),
            received=sum(part.received for part in parts),
            messages_sent=sum(part.messages_sent for part in parts),
            messages_received=sum(part.messages_received for part in parts),
            seconds=sum(part.seconds for part in parts),
        )


@dataclass(frozen=True)
class Inference:
    """What two parties computed, and what it took; `str` gives a table.

    logits: [B, classes]. layers: in order; the set-up is apart.

    >>> fc = Measured(layer="fc", sent=80, received=80, messages_sent=1, seconds=0.5)
    >>> agreement = {"images": 1, "difference": 1e-4, "same_class": 1.0}
    >>> trust = "two-party, semi-honest"
    >>> setup = Measured(layer="set-up")
    >>> print(Inference("spu-cheetah", trust, torch.zeros(1, 2), (fc,), setup, agreement))
    spu-cheetah, 1 images in one run: two-party, semi-honest
      classes equal to plaintext: 100.0%, logits differ by 0.0001 of the largest
      set-up: 0 B, 0 s
      layer       sent   received   messages    seconds
      fc        80.0 B     80.0 B          1     500 ms
      total     80.0 B     80.0 B          1     500 ms
    """

    engine: str
    trust: str
    logits: Tensor
    layers: tuple[Measured, ...]
    setup: Measured
    agreement: Mapping[str, Any] | None = None  # with plaintext, if that is known
    predicted: Cost | None = None

    @property
    def total(self) -> Measured:
        """Of all images, without the set-up."""
        return Measured.total(self.layers)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def run(
    net: nn.Module,
    images: Tensor,
    engine: str = "spu-cheetah",
    *,
    weights_of: str = "both",
    narrow: Mapping[str, tuple[int, int]] | None = None,
    python: str | os.PathLike[str] | None = None,
    timeout: float = 600,
    places: tuple[Place, Place] = HERE_BOTH,
) -> Inference:
    """A private inference of two processes on this machine, one with images, one with weights.

    Args:
        net: with masks, or in gather form.
        images: normalised, [B, ...]; all of them share rounds.
        engine: "spu-cheetah" (two-party, semi-honest), "spu-semi2k" or "crypten" (simulations:
            their dealer is one of the parties).
        weights_of: "both" parties, in shares, or the "server" alone, under SPU.
        narrow: for crypten, the bits (low, high) that the comparisons of a site read.
        python: the interpreter of the engine's environment; None: of the one that `make private`
            made here or in the clone.
        timeout: seconds that a party waits for the other.
        places: where client and server run: an address, and a command before theirs (nsenter).

    >>> run(fastbcd.models.resnet20(), torch.zeros(1, 3, 32, 32), "delphi")
    Traceback (most recent call last):
        ...
    ValueError: engine='delphi'; choose from spu-cheetah, spu-semi2k, crypten
    """
    check_choice("weights_of", weights_of, OWNERS)
    interpreter = interpreter_of(engine, python)
    artefact = artefact_of(net, images)
    logits, (setup, *layers) = run_artefact(
        artefact,
        images.cpu().numpy(),
        engine,
        owned=weights_of == "server",
        narrow=narrow or {},
        python=interpreter,
        timeout=timeout,
        places=places,
    )
    with eval_mode(net), torch.no_grad():
        expected = logits_of(net(images.to(device_of(net)))).cpu().numpy()
    return Inference(
        engine=engine,
        trust=ENGINES[engine].trust,
        logits=torch.from_numpy(logits),
        layers=tuple(layers),
        setup=setup,
        agreement=compared(logits, expected),
        predicted=_predicted(net, images, engine, weights_of),
    )


def run_artefact(
    artefact: Artefact,
    images: np.ndarray,
    engine: str,
    *,
    owned: bool = False,
    narrow: Mapping[str, tuple[int, int]] | None = None,
    python: str | os.PathLike[str] | None = None,
    timeout: float = 600,
    places: tuple[Place, Place] = HERE_BOTH,
) -> tuple[np.ndarray, list[Measured]]:
    """The logits of two parties, and what each layer took, the set-up first.

    For an artefact of any operations, such as `Artefact.of` makes by hand: consecutive operations
    of one layer are counted together. owned: only the server has the weights. places: of client and
    server.
    """
    interpreter = interpreter_of(engine, python)
    artefact.check_images(images)
    settings = {
        "engine": engine,
        "owned": owned,
        "narrow": dict(narrow or {}),
        "tls": None,
        "seconds": timeout,
        "fingerprint": artefact.fingerprint(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "net.pi").write_bytes(artefact.written())
        np.save(folder / "images.npy", images)
        server = start(
            interpreter,
            settings
            | {
                "role": "server",
                "artefact": str(folder / "net.pi"),
                "address": [places[1].host, 0],
            },
            places[1],
        )
        client = None
        try:
            address = listening(server)
            client = start(
                interpreter,
                settings
                | {
                    "role": "client",
                    "images": str(folder / "images.npy"),
                    "address": address,
                    "result": str(folder / "result"),
                },
                places[0],
            )
            wait({"client": client, "server": server})
            result = read_result(folder / "result")
            return result.logits.numpy(), [result.setup, *result.layers]
        finally:
            for party in (client, server):
                if party is not None and party.poll() is None:
                    party.kill()
                    party.communicate()


def interpreter_of(engine: str, python: str | os.PathLike[str] | None) -> Path:
    """The interpreter that has the engine; refused with the commands that install it."""
    check_choice("engine", engine, tuple(ENGINES))
    info = ENGINES[engine]
    places = [Path(info.folder), CLONE / info.folder]
    candidates = [place / "bin" / "python" for place in places]
    if python is not None:
        candidates = [Path(python)]
    for candidate in candidates:
        if candidate.exists() and _has(candidate, info):
            return candidate.absolute()
    commands = "\n  ".join(info.install)
    raise ImportError(
        f"{engine} needs {info.package} {info.version}, which {candidates[0]} does not have. "
        f"In a clone of fastbcd:\n  make private\nor, in any folder:\n  {commands}"
    )


def _has(python: Path, info: EngineInfo) -> bool:
    """Does this interpreter have the engine, in its version?"""
    ask = f"from importlib.metadata import version as v; print(v({info.package!r}))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return found.stdout.strip() == info.version


def start(
    python: Path, settings: Mapping[str, Any], place: Place = HERE_BOTH[0]
) -> subprocess.Popen[str]:
    """A process that is a party."""
    program = (
        f"import sys; sys.path.append({str(HERE)!r}); "
        f"from two_party.party import main; main()"
    )
    command = [*place.command, str(python), "-c", program, json.dumps(settings)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def listening(server: subprocess.Popen[str]) -> list[Any]:
    """Where a server waits for its client: [host, port]."""
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.startswith("listening on "):
        _, errors = server.communicate()
        raise RuntimeError(f"the server ended: {last_line(errors)}")
    host, _, port = line.split()[2].rstrip(",").rpartition(":")
    return [host, int(port)]


def wait(parties: Mapping[str, subprocess.Popen[str]]) -> None:
    """Until all end; their errors are one."""
    failed = []
    for name, party in parties.items():
        _, errors = party.communicate()
        if party.returncode:
            failed.append(f"the {name} ended: {last_line(errors)}")
    if failed:
        raise RuntimeError("; ".join(failed))


def last_line(errors: str) -> str:
    """What a party wrote last on standard error."""
    lines = errors.strip().splitlines()
    return lines[-1] if lines else "without a word"


def read_result(path: Path) -> Inference:
    """What a client wrote."""
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["fastbcd"])
        logits = torch.from_numpy(file.get_tensor("logits"))
    setup, *layers = (Measured(**row) for row in about["rows"])
    engine = about["engine"]
    return Inference(engine, ENGINES[engine].trust, logits, tuple(layers), setup)


def _predicted(
    net: nn.Module, images: Tensor, engine: str, weights_of: str
) -> Cost | None:
    """The cost by the protocol's figures; None for a net without masks."""
    try:
        return cost(
            net, engine, weights_of=weights_of, images=images, batch=len(images)
        )
    except ValueError:
        return None


def summary(result: Inference) -> str:
    """An inference in one line.

    >>> fc = Measured(layer="fc", sent=80, received=80, messages_sent=1, seconds=0.5)
    >>> setup = Measured(layer="set-up", seconds=3.0)
    >>> summary(Inference("crypten", "a simulation", torch.zeros(1, 2), (fc,), setup))
    'crypten (a simulation): 500 ms, 160 B, 1 messages each way; set-up 3.00 s, 0 B'
    """
    total = result.total
    setup = result.setup
    return (
        f"{result.engine} ({result.trust}): {si(total.seconds, 's')}, {si(total.bytes, 'B')}, "
        f"{total.messages:,} messages each way; set-up {si(setup.seconds, 's')}, "
        f"{si(setup.bytes, 'B')}"
    )


def _lines(result: Inference) -> list[str]:
    """The table of a result: each layer, and beside it what `cost` predicts."""
    images = len(result.logits)
    agreement = result.agreement
    total = result.total
    lines = [f"{result.engine}, {images} images in one run: {result.trust}"]
    if agreement is not None:
        lines.append(
            f"  classes equal to plaintext: {agreement['same_class']:.1%}, logits differ by "
            f"{agreement['difference']:.1g} of the largest"
        )
    setup = result.setup
    lines.append(f"  set-up: {si(setup.bytes, 'B')}, {si(setup.seconds, 's')}")
    rows = [["layer", "sent", "received", "messages", "seconds"]]
    predicted: dict[str, Any] = {}
    if result.predicted is not None:
        rows[0] += ["bytes", "predicted", "messages", "predicted"]
        parts = (*result.predicted.sites, *result.predicted.layers)
        predicted = {part.name: part for part in parts}
        predicted["total"] = result.predicted.total
    for part in (*result.layers, total):
        row = [part.layer, si(part.sent, "B"), si(part.received, "B")]
        row += [f"{part.messages:,}", si(part.seconds, "s")]
        known = predicted.get(part.layer)
        if known is not None:
            row += [si(part.bytes, "B"), si(known.bytes, "B")]
            row += [f"{part.messages:,}", si(known.messages)]
        rows.append(row)
    return lines + [f"  {line}" for line in columns(rows, width=11)]
