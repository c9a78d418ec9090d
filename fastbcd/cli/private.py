"""`fastbcd private serve` and `ask`: a private inference between two machines."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from fastbcd.private.running import (
    ENGINES,
    Inference,
    interpreter_of,
    last_line,
    listening,
    read_result,
    start,
)
from fastbcd.private.two_party.artefact import Artefact
from fastbcd.runtime.show import say

TWO_MACHINES = ("spu-cheetah", "spu-semi2k")  # engines with TLS


def serve(
    source: Path,
    listen: str = "127.0.0.1:7700",
    tls: Path | None = None,
    engine: str = "spu-cheetah",
    weights_of: str = "server",
    once: bool = False,
    timeout: float = 600,
    python: Path | None = None,
) -> int:
    """Answer private inferences with the weights of an artefact, one client after the other.

    Clients learn the operations and shapes and their own logits, and no weights.

    Args:
        source: what fastbcd.private.export wrote, net.pi
        listen: HOST:PORT (127.0.0.1:7700); the engine takes one more port
        tls: folder with cert.pem and key.pem of the server, and the client's cert.pem as peer.pem
        engine: spu-cheetah (two-party, semi-honest) or spu-semi2k (not private: its dealer is the
            client)
        weights_of: the "server" alone has the weights, or "both" in shares (server)
        once: end after one client
        timeout: seconds that the server waits for its client (600)
        python: interpreter of the engine's environment (of .venv-spu)
    """
    interpreter = _interpreter(engine, python)
    settings = {
        "role": "server",
        "artefact": str(source),
        "address": _address(listen),
        "tls": _folder(tls),
        "engine": engine,
        "owned": weights_of == "server",
        "narrow": {},
        "seconds": timeout,
    }
    Artefact.open(source)  # refuses what is none
    while True:
        party = start(interpreter, settings)
        try:
            host, port = listening(party)
            fingerprint = Artefact.open(source).fingerprint()
            say(f"{engine}, {ENGINES[engine].trust}: artefact {fingerprint}")
            say(f"listening on {host}:{port}")
            _, errors = party.communicate()
        finally:
            party.kill()
        settings["address"] = [host, port]
        if party.returncode:
            say(f"no inference: {last_line(errors)}")
        else:
            say("answered one client")
        if once:
            return min(party.returncode, 1)


def ask(
    source: Path,
    server: str = "127.0.0.1:7700",
    tls: Path | None = None,
    artefact: str | None = None,
    out: Path | None = None,
    timeout: float = 600,
    python: Path | None = None,
) -> None:
    """Ask a server for the logits of images that it does not see.

    Args:
        source: normalised images, .npy, [C, H, W] or [B, C, H, W]
        server: HOST:PORT of the server (127.0.0.1:7700)
        tls: folder with cert.pem and key.pem of the client, and the server's cert.pem as peer.pem
        artefact: what the server must serve; it prints these digits
        out: .npy file for the logits
        timeout: seconds that the client waits for the server (600)
        python: interpreter of the engine's environment (of .venv-spu)
    """
    interpreter = _interpreter("spu-cheetah", python)
    images = np.load(source, allow_pickle=False)
    if images.ndim == 3:
        images = images[None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "images.npy", images)
        settings = {
            "role": "client",
            "images": str(folder / "images.npy"),
            "address": _address(server),
            "tls": _folder(tls),
            "fingerprint": artefact,
            "seconds": timeout,
            "result": str(folder / "result"),
        }
        party = start(interpreter, settings)
        try:
            _, errors = party.communicate()
        finally:
            party.kill()
        if party.returncode:
            raise OSError(last_line(errors))
        result = read_result(folder / "result")
    if out is not None:
        np.save(out, result.logits)
    _show(result)


def _show(result: Inference) -> None:
    """The classes, and what they took."""
    classes = " ".join(str(number) for number in result.logits.argmax(1).tolist())
    print(f"classes: {classes}")
    print(result)


def _interpreter(engine: str, python: Path | None) -> Path:
    if engine not in TWO_MACHINES:
        raise ValueError(
            f"--engine {engine}: choose from {', '.join(TWO_MACHINES)}; CrypTen has no TLS, and "
            f"its dealer is the client"
        )
    return interpreter_of(engine, python)


def _address(text: str) -> list[str | int]:
    """[host, port]."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: give HOST:PORT, as in 10.0.0.1:7700")
    return [host, int(port)]


def _folder(tls: Path | None) -> str:
    if tls is None:
        raise ValueError(
            "give --tls DIR, with cert.pem, key.pem and peer.pem; docs/private-inference.md "
            "has the commands that make them"
        )
    return str(tls)
