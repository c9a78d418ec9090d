"""Two machines: serve and ask over mutual TLS, and what each side says when that fails."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import delayed_link
import numpy as np
import pytest
import torch

import fastbcd
from fastbcd import private
from fastbcd.cli.main import main
from fastbcd.private.running import listening, start
from fastbcd.private.two_party.artefact import Artefact
from helpers.engines import need, small_net

PYTHON = Path(sys.executable)  # enough up to the point where an engine is needed
SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An artefact, images, and certificates of server, client and somebody else."""
    made = tmp_path_factory.mktemp("two_machines")
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    net = small_net()
    private.export(net, images, made / "net.pi")
    np.save(made / "images.npy", images.numpy())
    with torch.no_grad():
        np.save(made / "logits.npy", net(images).numpy())
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    for role in ("server", "client", "other"):
        (made / role).mkdir()
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
             "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365", "-subj", f"/CN={role}",
             "-keyout", made / role / "key.pem", "-out", made / role / "cert.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    for role, peer in (("server", "client"), ("client", "server"), ("other", "server")):
        shutil.copy(made / peer / "cert.pem", made / role / "peer.pem")
    return made


def serving(folder: Path, seconds: float = SECONDS, python: Path = PYTHON) -> subprocess.Popen:
    settings = {
        "role": "server", "artefact": str(folder / "net.pi"), "address": ["127.0.0.1", 0],
        "tls": str(folder / "server"), "engine": "spu-cheetah", "owned": True, "narrow": {},
        "seconds": seconds,
    }  # fmt: skip
    return start(python, settings)


def asking(
    folder: Path, address: list, tls: str = "client", python: Path = PYTHON, **more: object
) -> subprocess.Popen:
    settings = {
        "role": "client", "images": str(folder / "images.npy"), "address": address,
        "tls": str(folder / tls), "fingerprint": None, "seconds": SECONDS,
        "result": str(folder / "result"),
    }  # fmt: skip
    return start(python, settings | more)


def said(party: subprocess.Popen) -> str:
    """What it wrote when it failed."""
    _, errors = party.communicate(timeout=600)
    assert party.returncode, errors
    assert len(errors.strip().splitlines()) == 1, errors
    return errors


def test_a_client_with_another_certificate(folder) -> None:
    server = serving(folder)
    client = asking(folder, listening(server), tls="other")
    assert "the server refused this party's certificate" in said(client)
    assert "the client has a wrong certificate" in said(server)


def test_a_server_with_another_certificate(folder, tmp_path) -> None:
    for name in ("cert.pem", "key.pem"):
        shutil.copy(folder / "client" / name, tmp_path)
    shutil.copy(folder / "other" / "cert.pem", tmp_path / "peer.pem")
    server = serving(folder)
    client = asking(folder, listening(server), tls=str(tmp_path))
    assert "the server has a wrong certificate" in said(client)
    assert "the client refused this party's certificate" in said(server)


def test_no_tls(folder) -> None:
    server = serving(folder)
    with socket.create_connection(listening(server)) as plain:
        plain.sendall(b"hello, I do not speak TLS\n" * 10)
        assert "the client does not speak TLS here" in said(server)


def test_another_artefact(folder) -> None:
    server = serving(folder)
    client = asking(folder, listening(server), fingerprint="0123456789abcdef")
    serves = Artefact.open(folder / "net.pi").fingerprint()
    for party in (client, server):
        assert f"asks for artefact 0123456789abcdef, and the server has {serves}" in said(party)


def test_images_of_another_shape(folder, tmp_path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((1, 3, 9, 9), np.float32))
    server = serving(folder)
    client = asking(folder, listening(server), images=str(tmp_path / "images.npy"))
    for party in (client, server):
        assert "images have shape [3, 9, 9], and this net takes [3, 8, 8]" in said(party)


def test_a_client_that_says_nothing(folder) -> None:
    server = serving(folder, seconds=1)
    with socket.create_connection(listening(server)):
        assert "the client sent nothing for 1 s" in said(server)


def test_a_client_that_leaves(folder) -> None:
    server = serving(folder)
    with socket.create_connection(listening(server)):
        pass
    assert "the client" in said(server)


def test_a_server_that_says_nothing(folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = asking(folder, list(silent.getsockname()), seconds=1)
        assert "the server sent nothing for 1 s" in said(client)


def test_no_server(folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = list(closed.getsockname())
    assert f"no server answers at 127.0.0.1:{address[1]}" in said(asking(folder, address))


def test_the_commands_refuse_what_they_cannot_use(folder, capsys) -> None:
    need("spu-cheetah")
    net, image = str(folder / "net.pi"), str(folder / "images.npy")
    cases = {
        ("serve", net): "give --tls DIR",
        ("serve", net, "--engine", "crypten"): "its dealer is the client",
        ("serve", net, "--listen", "here", "--tls", "x"): "give HOST:PORT",
        ("serve", image, "--tls", "x"): "is no artefact",
        ("ask", image): "give --tls DIR",
        ("ask", image, "--tls", str(folder)): "lacks cert.pem, key.pem, peer.pem",
    }
    for words, message in cases.items():
        assert main(["private", *words]) == 2
        assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------ with an engine


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fastbcd", "private", *map(str, words)]


@pytest.mark.long
def test_serve_and_ask_in_two_network_namespaces(folder, tmp_path) -> None:
    """With 5 ms each way; the packets on the link carry what the result says."""
    need("spu-semi2k")
    torch.manual_seed(0)
    images = torch.randn(1, 3, 32, 32)
    net = fastbcd.models.resnet20(10, 32, width=8, blocks=1, replacement="line").eval()
    private.export(net, images, tmp_path / "net.pi")
    np.save(tmp_path / "images.npy", images.numpy())
    try:
        link = delayed_link.Link(one_way=0.005)
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    with link:
        server = subprocess.Popen(
            [*link.places[1].command, *command(
                "serve", tmp_path / "net.pi", "--listen", f"{link.places[1].host}:7700",
                "--tls", folder / "server", "--engine", "spu-semi2k", "--once")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        while "listening" not in (line := server.stdout.readline()):
            assert line, "the server ended"
        subprocess.run(
            [*link.places[0].command, *command(
                "ask", tmp_path / "images.npy", "--server", f"{link.places[1].host}:7700",
                "--tls", folder / "client", "--out", tmp_path / "logits.npy")],
            check=True, timeout=600,
        )  # fmt: skip
        server.communicate(timeout=600)
        carried = sum(link.carried)
        exchanges = link.bursts(0, least=200)  # acknowledgements and small frames are shorter
    with torch.no_grad():
        expected = net(images).numpy()
    assert np.abs(np.load(tmp_path / "logits.npy") - expected).max() < 0.02 * np.abs(expected).max()
    cost = private.cost(net, "spu-semi2k", weights_of="server", images=images)
    shared = private.cost(net, "spu-semi2k", images=images)
    predicted = cost.bytes or shared.bytes
    assert abs(carried / predicted - 1) < 0.1, (carried, predicted)
    messages = shared.total.messages  # of which the packets tell only about how many there are
    assert abs(exchanges / messages - 1) < 0.2, (exchanges, messages)


@pytest.mark.long
def test_a_client_that_is_killed_during_the_inference(folder) -> None:
    need("spu-cheetah")
    python = private.running.interpreter_of("spu-cheetah", None)
    server = serving(folder, python=python)
    client = asking(folder, listening(server), python=python)
    time.sleep(12)  # the set-up has begun; whatever the moment, the server must end
    client.kill()
    client.communicate()
    assert "the client" in said(server)
