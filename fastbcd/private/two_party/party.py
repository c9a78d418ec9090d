"""One party of a private inference: the client, which has images, or the server, which has weights.

    python -c "...; from two_party.party import main; main()" SETTINGS

SETTINGS is JSON; `fastbcd/private/running.py` starts both parties on one machine, `fastbcd private
serve` and `ask` one each. They talk over a channel (channel.py): the client sends what it has, the
server answers with the operations and shapes, then both compute over the engine's own connection.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from . import channel as channels
from .artefact import Artefact
from .channel import Broken, Connection

ENGINES = {  # the module and class of each
    "spu-cheetah": ("spu_engine", "SpuParty"),
    "spu-semi2k": ("spu_engine", "SpuParty"),
    "crypten": ("crypten_engine", "CrypTenParty"),
}
CLIENT, SERVER = 0, 1


def main() -> None:
    """Be a party; errors are one line on standard error."""
    settings = json.loads(sys.argv[1])
    try:
        roles = {"server": serve, "client": ask}
        roles[settings["role"]](settings)
    except (Broken, ValueError, OSError, ImportError, RuntimeError) as error:
        if settings.get("traceback"):
            raise
        text = " ".join(str(error).split())
        print(text, file=sys.stderr, flush=True)
        sys.exit(2)


def serve(settings: dict[str, Any]) -> None:
    """Answer one client."""
    tls = _folder(settings)
    artefact = Artefact.open(settings["artefact"])
    if tls:
        channels.context(tls, "server")  # refuses a folder that lacks a file
    waiting = channels.listener(*settings["address"])
    host, port = waiting.getsockname()[:2]
    print(f"listening on {host}:{port}, artefact {artefact.fingerprint()}", flush=True)
    channel = channels.accepted(waiting, tls, settings["seconds"])
    waiting.close()
    wish = json.loads(channel.receive())
    refusal = _refusal(artefact, wish)
    here = channel.connection.getsockname()[0]
    addresses = [wish["address"], f"{here}:{channels.free_port(here)}"]
    answer = {name: settings[name] for name in ("engine", "owned", "narrow")}
    answer |= {"refusal": refusal, "addresses": addresses}
    channel.send(json.dumps(answer).encode())
    if refusal:
        raise Broken(f"the client was refused: {refusal}")
    channel.send(artefact.without_secrets().written())
    _inferred(SERVER, channel, answer, artefact, wish["images"], None, tls)
    channel.connection.close()


def _refusal(artefact: Artefact, wish: dict[str, Any]) -> str:
    """Why the client is not served; empty if it is."""
    shape = artefact.about["image"]
    if wish["fingerprint"] not in (None, artefact.fingerprint()):
        return (
            f"it asks for artefact {wish['fingerprint']}, and the server has "
            f"{artefact.fingerprint()}"
        )
    if wish["shape"] != shape:
        return f"its images have shape {wish['shape']}, and this net takes {shape}"
    return ""


def ask(settings: dict[str, Any]) -> None:
    """Ask the server about images."""
    tls = _folder(settings)
    images = np.load(settings["images"], allow_pickle=False).astype(np.float32)
    host, port = settings["address"]
    channel = channels.connected(host, port, tls, settings["seconds"])
    here = channel.connection.getsockname()[0]
    wish = {
        "images": len(images),
        "shape": list(images.shape[1:]),
        "fingerprint": settings["fingerprint"],
        "address": f"{here}:{channels.free_port(here)}",
    }
    channel.send(json.dumps(wish).encode())
    answer = json.loads(channel.receive())
    if answer["refusal"]:
        raise Broken(f"the server refused: {answer['refusal']}")
    artefact = Artefact.read(channel.receive(), "what the server sent")
    artefact.check_images(images)
    rows, logits = _inferred(
        CLIENT, channel, answer, artefact, len(images), images, tls
    )
    channel.connection.close()
    about = {"rows": rows, "engine": answer["engine"]}
    data = save({"logits": np.asarray(logits)}, {"fastbcd": json.dumps(about)})
    Path(settings["result"]).write_bytes(data)


def _inferred(rank: int, channel: Connection, *more: Any) -> Any:
    """`_infer`, with an engine's errors as one sentence."""
    try:
        return _infer(rank, channel, *more)
    except RuntimeError as error:
        what = str(error).partition("stacktrace")[0].strip()
        raise Broken(
            f"the {channel.other} went away, or sent nothing for {channel.seconds:g} s, during "
            f"the inference: {what}"
        ) from error


def _infer(
    rank: int,
    channel: Connection,
    answer: dict[str, Any],
    artefact: Artefact,
    batch: int,
    images: np.ndarray | None,
    tls: Path | None,
) -> tuple[list[dict[str, Any]], np.ndarray | None]:
    """The logits, for the client; and what each layer took, the set-up first."""
    begin = time.perf_counter()
    channel.watch()
    about = artefact.about
    module, name = ENGINES[answer["engine"]]
    engine = getattr(import_module(f".{module}", __package__), name)(
        answer["engine"],
        rank,
        answer["addresses"],
        channel,
        fixed_point=about["fixed_point"],
        owned=answer["owned"],
        tls=tls,
        narrow=answer["narrow"],
    )
    given = 0
    for name, shape in about["secret"].items():
        given += engine.share(name, SERVER, shape, artefact.tensors.get(name))
    sides = (("sent", "received"), ("received", "sent"))[rank]
    shared = time.perf_counter()
    size = engine.share("image", CLIENT, (batch, *about["image"]), images)
    image = _message("image", sides[0], size, shared)
    setup = _warm_up(engine)
    setup[sides[1]] += given
    layers = _compiled(engine, artefact, batch)
    setup["seconds"] = time.perf_counter() - begin - image["seconds"]
    rows: list[dict[str, Any]] = [{"layer": "set-up", **setup}, image]
    for layer, executable in layers:
        rows.append({"layer": layer, **engine.run(executable)})
    channel.finished.set()
    begin = time.perf_counter()
    logits, size = engine.reveal(artefact.output)
    rows.append(_message("logits", sides[1], size, begin))
    engine.close()
    return rows, logits


def _message(layer: str, side: str, size: int, begin: float) -> dict[str, Any]:
    """What one message took. side: "sent" or "received"."""
    seconds = time.perf_counter() - begin
    return {
        "layer": layer,
        side: size,
        f"messages_{side}": int(size > 0),
        "seconds": seconds,
    }


def _warm_up(engine: Any) -> dict[str, Any]:
    """A product, comparisons and a square: what an engine prepares once is no part of a layer."""
    engine.share("warm", CLIENT, (8, 64), np.ones((8, 64), np.float32))
    engine.share("warm.w", SERVER, (64, 64), np.ones((64, 64), np.float32))
    engine.share("warm.b", SERVER, (64,), np.ones(64, np.float32))
    operations: list[dict[str, Any]] = [
        {"name": "warm.1", "kind": "product", "of": ["warm", "warm.w", "warm.b"]},
        {"name": "warm.2", "kind": "relu", "of": ["warm.1"]},
        {"name": "warm.3", "kind": "square", "of": ["warm.2"]},
    ]
    for operation in operations:
        operation |= {"layer": "set-up", "shape": [64]}
    return engine.run(engine.compile(operations, ["warm.3"], {}, 8))


def _compiled(engine: Any, artefact: Artefact, batch: int) -> list[tuple[str, Any]]:
    """An executable for each run of operations of one layer."""
    secret = artefact.about["secret"]
    public = {
        name: array for name, array in artefact.tensors.items() if name not in secret
    }
    groups = [list(group) for _, group in groupby(artefact.operations, _layer)]
    last_use = {artefact.output: len(groups)}
    for number, group in enumerate(groups):
        for operation in group:
            last_use |= dict.fromkeys(operation["of"], number)
    last_use[artefact.output] = len(groups)
    made = []
    for number, group in enumerate(groups):
        names = [operation["name"] for operation in group]
        results = [name for name in names if last_use.get(name, 0) > number]
        wanted = {name for each in group for name in each["of"]}
        wanted |= {each["index"] for each in group if "index" in each}
        constants = {name: public[name] for name in wanted if name in public}
        executable = engine.compile(group, results, constants, batch)
        made.append((_layer(group[0]), executable))
    return made


def _layer(operation: dict[str, Any]) -> str:
    return operation["layer"]


def _folder(settings: dict[str, Any]) -> Path | None:
    return Path(settings["tls"]) if settings["tls"] else None
