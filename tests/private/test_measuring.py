"""measure: probes are what they say, and their figures come back from what they took."""

from __future__ import annotations

import numpy as np
import pytest

from fastbcd import private
from fastbcd.private import measuring
from fastbcd.private.running import Measured


def taken(protocol: private.Protocol, probes: list[measuring.Probe]) -> list[Measured]:
    """What the probes take if the protocol is right; a set-up of 5 bytes and 2 seconds."""
    rows = [Measured(layer="set-up", sent=2, received=3, seconds=2.0)]
    for number, probe in enumerate(probes):
        price = protocol.constants()
        sent, messages, seconds = (
            float(price[f"{probe.kind}_{quantity}"].times(probe.amounts, per))
            for quantity, per in (("bytes", "units"), ("messages", "sites"), ("seconds", "units"))
        )
        rows.append(
            Measured(
                layer=f"probe {number}", sent=round(sent), messages_sent=round(messages),
                seconds=seconds,
            )
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("name", ["crypten", "spu-semi2k"])
def test_figures_are_found_again(name, monkeypatch, tmp_path) -> None:
    known = private.PROTOCOLS[name]
    probes = measuring.probes_of()
    rows = taken(known, probes)
    monkeypatch.setattr(measuring, "run_artefact", lambda *_, **__: (None, rows))
    ours = private.measure(name)
    kinds = {"crypten": ("crypten", "line"), "spu-semi2k": ("spu-semi2k", "line")}[name]
    net = measured_net(kinds[1])
    before, after = (private.cost(net, protocol) for protocol in (known, ours))
    assert after.bytes == pytest.approx(before.bytes, rel=1e-6)
    assert after.total.messages == before.total.messages
    assert after.rounds == before.rounds
    assert after.total.compute == pytest.approx(before.total.compute, rel=1e-3)
    assert (ours.setup_bytes.value, ours.setup_seconds.value) == (5, 2.0)
    ours.save(tmp_path / "ours.json")
    assert private.Protocol.load(tmp_path / "ours.json") == ours
    assert private.Target(seconds=1, protocol=ours).protocol is ours


def measured_net(replacement: str):
    import fastbcd

    net = fastbcd.models.resnet20(10, 32, width=8, replacement=replacement)
    kept = fastbcd.masks(net)
    fastbcd.set_masks(net, kept.without(range(0, kept.total, 2)))
    return net


def test_the_connection_is_taken_off(monkeypatch) -> None:
    """Seconds are those of computation: without 8 bytes / bandwidth and rounds * rtt."""
    known = private.PROTOCOLS["spu-semi2k"]
    rows = taken(known, measuring.probes_of())
    late = [rows[0]]
    for row in rows[1:]:
        delay = 8 * row.bytes / 1e6 + 0.01 * row.messages / 2
        late.append(Measured(layer=row.layer, sent=row.sent, messages_sent=row.messages_sent,
                             seconds=row.seconds + delay))  # fmt: skip
    found = []
    for some, options in ((rows, {}), (late, {"bandwidth": "1Mbit", "rtt": "10ms"})):
        monkeypatch.setattr(measuring, "run_artefact", lambda *_, s=some, **__: (None, s))
        found.append(private.measure("spu-semi2k", **options).relu_seconds.values)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_probes_in_plaintext() -> None:
    """Each computes its operation on its part of the image, and nothing is left out."""
    probes = measuring.probes_of()
    artefact = measuring.artefact_of(probes)
    image = np.random.default_rng(1).normal(size=(1, 16_384)).astype(np.float32)
    logits = artefact.logits(image)
    assert logits.shape == (1, len(probes))
    for number, probe in enumerate(probes):
        last = image[0, probe.inputs[0] - 1]
        expected = {
            "relu": max(last, 0), "line": 0.3 * last, "square": 0.3 * last**2 + 0.3 * last
        }  # fmt: skip
        if probe.kind in expected:
            assert logits[0, number] == pytest.approx(expected[probe.kind], rel=1e-4)
    assert {probe.kind for probe in probes} == {"relu", "square", "line", "layer"}


def test_a_server_with_weights(monkeypatch) -> None:
    """The figures of layers are those of `owned`; of the other kind nothing is known."""
    rows = taken(private.PROTOCOLS["spu-cheetah"], measuring.probes_of()[6:])
    numbers = range(6, 6 + len(rows) - 1)
    renamed = [rows[0]] + [
        Measured(layer=f"probe {n}", sent=row.sent, seconds=row.seconds)
        for n, row in zip(numbers, rows[1:], strict=True)
    ]
    renamed += [Measured(layer=f"probe {n}", sent=8) for n in range(6)]
    monkeypatch.setattr(measuring, "run_artefact", lambda *_, **__: (None, renamed))
    ours = private.measure("spu-cheetah", weights_of="server")
    assert ours.layer_bytes.value is None
    assert ours.owned_bytes.values["sent"] == pytest.approx(369_900, rel=1e-3)
