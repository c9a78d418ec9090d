"""run: two processes of each engine, compared with plaintext; what is missing is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import private
from fastbcd.private.running import ENGINES, Inference, Measured, run_artefact
from fastbcd.private.two_party.artefact import Artefact
from helpers.engines import need, small_net


def relus_by_hand(count: int, size: int) -> Artefact:
    """So many ReLUs, one after the other, each a layer."""
    operations, before = [], "image"
    for number in range(count):
        operation = {"name": f"y{number}", "kind": "relu", "layer": f"relu {number}"}
        operations.append(operation | {"of": [before], "shape": [size]})
        before = f"y{number}"
    return Artefact.of(operations, {}, secret=(), image=(size,))


def test_an_engine_that_is_missing_is_refused_with_its_commands(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for engine, info in ENGINES.items():
        with pytest.raises(ImportError) as caught:
            private.run(nn.Linear(3, 2), torch.zeros(1, 3), engine, python=sys.executable)
        for command in ("make private", *info.install):
            assert command in str(caught.value)
        assert info.version in str(caught.value)


def test_the_makefile_installs_the_versions_that_the_error_names() -> None:
    makefile = (fastbcd.private.running.CLONE / "Makefile").read_text()
    for info in ENGINES.values():
        for command in info.install[1:]:
            _, _, packages = command.partition(" install ")
            for package in packages.split():
                assert package in makefile, package


def test_the_table_has_trust_set_up_and_predictions() -> None:
    net = small_net()
    cost = private.cost(net, "crypten", images=torch.zeros(1, 3, 8, 8))
    layers = [Measured(layer="conv1", sent=2400, received=2400, messages_sent=1, seconds=0.1)]
    setup = Measured(layer="set-up", sent=5_000_000, seconds=3.0)
    trust = ENGINES["crypten"].trust
    result = Inference("crypten", trust, torch.zeros(1, 5), tuple(layers), setup, None, cost)
    text = str(result)
    assert "dealer is party 0: a simulation, not private" in text
    assert "set-up: 5.00 MB, 3.00 s" in text
    assert "4.80 kB    4.80 kB" in text
    assert result.total.bytes == 4800


def test_trust_is_said_of_every_engine() -> None:
    assert ENGINES["spu-cheetah"].trust == "two-party, semi-honest"
    for engine in ("spu-semi2k", "crypten"):
        assert "a simulation, not private" in ENGINES[engine].trust


# ------------------------------------------------------------------------------ with engines


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_two_parties_agree_with_plaintext(engine, replacement) -> None:
    need(engine)
    torch.manual_seed(0)
    net, images = small_net(replacement), torch.randn(3, 3, 8, 8)
    result = private.run(net, images, engine)
    assert result.agreement["same_class"] == 1.0
    assert result.agreement["difference"] < 2e-2
    assert result.total.bytes > 0
    names = {part.layer for part in result.layers}
    assert {"conv1", "alpha", "linear"} <= names


@pytest.mark.long
def test_crypten_sends_what_cost_predicts() -> None:
    need("crypten")
    net, image = small_net(), torch.randn(1, 3, 8, 8)
    result = private.run(net, image, "crypten")
    predicted = result.predicted
    known = {part.name: part for part in (*predicted.sites, *predicted.layers)}
    for part in result.layers:
        if part.layer in known and part.layer != "logits":
            assert part.bytes == known[part.layer].bytes, part.layer
            assert part.messages == known[part.layer].messages, part.layer
    assert abs(result.total.bytes / predicted.bytes - 1) < 0.01


@pytest.mark.long
def test_weights_of_the_server_halve_the_bytes_of_layers() -> None:
    need("spu-cheetah")
    net, image = small_net(), torch.randn(1, 3, 8, 8)
    shared = private.run(net, image, "spu-cheetah")
    owned = private.run(net, image, "spu-cheetah", weights_of="server")
    assert owned.agreement["same_class"] == 1.0
    assert owned.total.bytes < 0.6 * shared.total.bytes


@pytest.mark.long
def test_images_share_messages() -> None:
    need("spu-semi2k")
    net, images = small_net(), torch.randn(4, 3, 8, 8)
    one = private.run(net, images[:1], "spu-semi2k")
    four = private.run(net, images, "spu-semi2k")
    assert four.total.messages == one.total.messages
    assert one.total.bytes < four.total.bytes < 4 * one.total.bytes


@pytest.mark.long
@pytest.mark.parametrize(("low", "high", "messages"), [(6, 22, 7), (12, 20, 6), (0, 32, 8)])
def test_narrow_comparisons_send_less(low, high, messages) -> None:
    need("crypten")
    artefact = relus_by_hand(3, size=200)
    images = np.random.default_rng(0).uniform(-4, 4, (2, 200)).astype(np.float32)
    window = {f"relu {number}": (low, high) for number in range(3)}
    logits, rows = run_artefact(artefact, images, "crypten", narrow=window)
    error = np.abs(logits - artefact.logits(images))
    assert error.max() < 2.0 ** (low - 16) + 1e-3
    _, whole = run_artefact(artefact, images, "crypten")
    for narrow, full in zip(rows, whole, strict=True):
        if narrow.layer.startswith("relu"):
            assert (narrow.messages, full.messages) == (messages, 9)
            assert narrow.bytes < full.bytes / 2


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_operations_by_hand_are_counted_one_by_one(engine) -> None:
    need(engine)
    artefact = relus_by_hand(2, size=100)
    images = np.random.default_rng(0).normal(size=(1, 100)).astype(np.float32)
    logits, (setup, *rows) = run_artefact(artefact, images, engine)
    np.testing.assert_allclose(logits, artefact.logits(images), atol=1e-3)
    assert [row.layer for row in rows] == ["image", "relu 0", "relu 1", "logits"]
    assert rows[1].messages == rows[2].messages > 0
    assert setup.seconds > 0


@pytest.mark.long
def test_what_an_engine_cannot_do_is_one_error() -> None:
    need("crypten")
    with pytest.raises(RuntimeError, match="the client ended: crypten shares the weights"):
        private.run(small_net(), torch.randn(1, 3, 8, 8), "crypten", weights_of="server")
