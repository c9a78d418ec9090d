"""measure: the figures of a protocol, from small probes on the user's own engine and machine.

Each probe is one operation of a known size. The figures of an engine go by the amounts that its
built-in protocol names, such as the ciphertexts of a product; here they are fitted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from fastbcd.private.layers import product
from fastbcd.private.protocols import PROTOCOLS, Constant, Protocol
from fastbcd.private.running import ENGINES, Measured, run_artefact
from fastbcd.private.two_party.artefact import Artefact
from fastbcd.private.units import bits_per_second, round_trip
from fastbcd.runtime.validate import check_choice

UNITS = (2_048, 16_384)  # of an activation; the larger one is the size of the image
# Inputs, side, outputs and kernel of convolutions; a side of 1 is a product of a vector.
LAYERS = (
    (3, 32, 16, 3),
    (16, 32, 16, 3),
    (16, 32, 16, 5),
    (32, 16, 32, 3),
    (32, 16, 32, 5),
    (64, 8, 64, 3),
    (64, 8, 64, 5),
    (4096, 1, 10, 1),
)
QUANTITIES = ("bytes", "messages", "seconds")


class Probe(NamedTuple):
    """An operation, what its cost goes by, and its tensors."""

    kind: str  # as in `Protocol`: "relu", "square", "line" or "layer"
    amounts: dict[str, int]
    inputs: list[int]  # their shape
    outputs: list[int]
    operations: list[
        tuple[str, tuple[str, ...]]
    ]  # kinds, and what they are of: x, tensors, steps before
    tensors: dict[str, np.ndarray]
    options: dict[str, Any] | None = None  # of a convolution


class Observed(NamedTuple):
    """What an operation of these amounts took."""

    kind: str
    amounts: Mapping[str, int]
    bytes: float
    messages: float
    seconds: float  # of computation


def measure(
    engine: str,
    *,
    bandwidth: float | str | None = None,
    rtt: float | str = 0,
    weights_of: str = "both",
    python: Any = None,
) -> Protocol:
    """The protocol of an engine, measured here: for `cost`, `Target` and `merge`.

    Args:
        engine: "spu-cheetah", "spu-semi2k" or "crypten", as in `run`.
        bandwidth, rtt: of the connection between the two processes, whose time is taken off;
            None and 0: that of this machine, which counts as computation.
        weights_of: whether layers have weights of "both" parties or of the "server"; the figures
            of the other kind are unknown.
        python: the interpreter of the engine's environment.

    Bytes, messages and seconds are fitted. Rounds follow from messages only in CrypTen; those of
    other engines are the built-in ones. `Protocol.save` keeps the result.

    >>> measure("delphi")
    Traceback (most recent call last):
        ...
    ValueError: engine='delphi'; choose from spu-cheetah, spu-semi2k, crypten
    """
    check_choice("engine", engine, tuple(ENGINES))
    known = PROTOCOLS[engine]
    bits = np.inf if bandwidth is None else bits_per_second(bandwidth)
    delay = round_trip(rtt)
    owned = weights_of == "server"
    probes = probes_of()
    images = np.random.default_rng(0).normal(0, 0.5, (1, max(UNITS))).astype(np.float32)
    _, rows = run_artefact(
        artefact_of(probes), images, engine, owned=owned, python=python
    )
    taken = {row.layer: row for row in rows}
    observed = []
    for number, probe in enumerate(probes):
        kind = "owned" if owned and probe.kind == "layer" else probe.kind
        row = taken[f"probe {number}"]
        seconds = row.seconds - 8 * row.bytes / bits
        if delay:
            rounds = known.constants()[f"{kind}_rounds"].times(probe.amounts, "sites")
            seconds -= float(rounds) * delay
        observed.append(
            Observed(kind, probe.amounts, row.bytes, row.messages, max(seconds, 0.0))
        )
    setup = taken["set-up"]
    return fitted(known, observed, setup, ENGINES[engine].version)


def probes_of() -> list[Probe]:
    """All probes, for images [1, 16384]."""
    activations: dict[str, list[tuple[str, tuple[str, ...]]]] = {
        "relu": [("relu", ("x",))],
        "square": [
            ("square", ("x",)),
            ("multiply", ("step 0", "c")),
            ("multiply", ("x", "c")),
            ("add", ("step 1", "step 2")),
        ],
        "line": [("multiply", ("x", "c"))],
    }
    probes = []
    for units in UNITS:
        constants = {"c": np.full((1, units), 0.3, np.float32)}
        for kind, operations in activations.items():
            probes.append(
                Probe(
                    kind=kind,
                    amounts={"units": units, "sites": 1},
                    inputs=[units],
                    outputs=[units],
                    operations=operations,
                    tensors={} if kind == "relu" else constants,
                )
            )
    return probes + [_layer(*sizes) for sizes in LAYERS]


def _layer(inputs: int, side: int, outputs: int, size: int) -> Probe:
    """A convolution that keeps the side, or a product of one vector."""
    positions = side * side
    terms = inputs * size**2
    amounts = product("", positions, terms, outputs, inputs=inputs * positions).amounts
    random = np.random.default_rng(0)
    if side == 1:
        weight = random.normal(0, 0.05, (inputs, outputs)).astype(np.float32)
        return Probe(
            kind="layer",
            amounts=amounts,
            inputs=[inputs],
            outputs=[outputs],
            operations=[("product", ("x", "weight", "bias"))],
            tensors={"weight": weight, "bias": np.zeros(outputs, np.float32)},
        )
    weight = random.normal(0, 0.05, (outputs, inputs, size, size)).astype(np.float32)
    return Probe(
        kind="layer",
        amounts=amounts,
        inputs=[inputs, side, side],
        outputs=[outputs, side, side],
        operations=[("convolution", ("x", "weight", "bias"))],
        tensors={"weight": weight, "bias": np.zeros((outputs, 1, 1), np.float32)},
        options={
            "stride": [1, 1],
            "padding": [size // 2] * 2,
            "dilation": [1, 1],
            "groups": 1,
        },
    )


def artefact_of(probes: Sequence[Probe]) -> Artefact:
    """The probes as layers of their own, and one number of each result as logits."""
    operations: list[dict[str, Any]] = []
    tensors: dict[str, np.ndarray] = {}
    secret: list[str] = []
    results = []

    def add(name: str, kind: str, layer: str, of: list[str], **more: Any) -> None:
        operations.append(
            {"name": name, "kind": kind, "layer": layer, "of": of, **more}
        )

    for number, probe in enumerate(probes):
        names = {"x": f"x {number}"}
        for name, tensor in probe.tensors.items():
            names[name] = f"{name} {number}"
            tensors[names[name]] = tensor
        if probe.kind == "layer":
            secret += [names[name] for name in probe.tensors]
        picked = f"index {number}"
        tensors[picked] = np.arange(int(np.prod(probe.inputs)))
        add(
            names["x"],
            "take",
            f"input {number}",
            ["image"],
            index=picked,
            shape=probe.inputs,
        )
        for place, (kind, of) in enumerate(probe.operations):
            result = f"{kind} {place} of {number}"
            inputs = [names[name] for name in of]
            more: dict[str, Any] = {"shape": probe.outputs}
            if probe.options is not None:
                more["options"] = probe.options
            add(result, kind, f"probe {number}", inputs, **more)
            names[f"step {place}"] = result
        results.append(result)
    sizes = [int(np.prod(probe.outputs)) for probe in probes]
    tensors["last"] = np.cumsum(sizes) - 1
    add("logits", "take", "logits", results, index="last", shape=[len(probes)])
    return Artefact.of(operations, tensors, secret=secret, image=(max(UNITS),))


def fitted(
    known: Protocol, observed: Iterable[Observed], setup: Measured, version: str
) -> Protocol:
    """The protocol with these operations' figures, by the amounts that the known one names."""
    observed = list(observed)
    figures: dict[str, Constant] = {}
    for kind in dict.fromkeys(each.kind for each in observed):
        here = [each for each in observed if each.kind == kind]
        for quantity in QUANTITIES:
            name = f"{kind}_{quantity}"
            values = np.array([getattr(each, quantity) for each in here])
            amounts = _amounts(known, kind, quantity)
            matrix = np.array([[each.amounts[a] for a in amounts] for each in here])
            weights = non_negative(matrix.astype(float), values)
            off = _largest_error(matrix @ weights, values)
            source = f"private.measure, {known.name} {version}, {len(here)} probes within {off:.1%}"
            numbers = [float(f"{weight:.6g}") for weight in weights]
            figures[name] = Constant(dict(zip(amounts, numbers, strict=True)), source)
        if known.name == "crypten":
            figures[f"{kind}_rounds"] = figures[f"{kind}_messages"]
    figures["setup_bytes"] = Constant(
        setup.bytes, f"private.measure, {known.name} {version}"
    )
    figures["setup_seconds"] = Constant(setup.seconds, figures["setup_bytes"].source)
    for name in ("reveal_bytes", "reveal_seconds", "reveal_rounds", "reveal_messages"):
        figures[name] = known.constants()[name]
    for field in fields(known)[1:]:
        if field.name.endswith("_rounds") and field.name not in figures:
            figures[field.name] = known.constants()[field.name]
    return Protocol(f"{known.name}, measured", **figures)


def _amounts(known: Protocol, kind: str, quantity: str) -> list[str]:
    """What a quantity goes by."""
    like = "layer" if kind == "owned" else kind
    names = list(known.constants()[f"{like}_{quantity}"].values)
    if names and names != [""]:
        return names
    return {"bytes": ["units"], "messages": ["sites"], "seconds": ["units", "sites"]}[
        quantity
    ]


def non_negative(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The numbers >= 0 that give least squared relative error, [columns].

    All sets of columns are tried: there are five at most.

    >>> non_negative(np.array([[1.0, 1.0], [2.0, 1.0]]), np.array([5.0, 7.0])).round(6).tolist()
    [2.0, 3.0]
    """
    scale = np.where(values > 0, values, 1.0)
    scaled = matrix / scale[:, None]
    goal = values / scale
    columns = range(matrix.shape[1])
    sets = chain.from_iterable(
        combinations(columns, n) for n in range(len(columns) + 1)
    )
    best = np.zeros(matrix.shape[1])
    for chosen in sets:
        weights = np.zeros(matrix.shape[1])
        part = list(chosen)
        weights[part] = np.linalg.lstsq(scaled[:, part], goal, rcond=None)[0]
        error = np.square(scaled @ weights - goal).sum()
        least = np.square(scaled @ best - goal).sum()
        if weights.min() >= 0 and error < least * (1 - 1e-9):
            best = weights
    return best


def _largest_error(found: np.ndarray, values: np.ndarray) -> float:
    """Relative, of the values above 0."""
    above = values > 0
    if not above.any():
        return 0.0
    return float(np.abs(found[above] / values[above] - 1).max())
