"""Whole inferences by two parties of real engines, measured beside what `private.cost` predicts.

    make private                                                      sets the engines up
    python benchmarks/private_inference.py                            a small net, seconds
    FASTBCD_DATA=folder python benchmarks/private_inference.py --net resnet20
    ... --net resnet20 --rtt 10 40                                    over links of these ms
    ... --net resnet20 --nets SNL=runs/snl BCD=runs/bcd               the nets of runs
    ... --layers                                                      the table of each layer, too

The parties are two processes, one pinned to each core, by default on loopback; with --rtt in two
network namespaces whose link delivers every packet half a round trip after it was sent
(delayed_link.py, which needs root). The nets keep ReLUs at random: removed ones are the identity, a
line or a quadratic; "emptied" has them in a quarter of the sites, "merged" is emptied with its
linear runs merged for the engine. Each row is one image, after a set-up that is shown apart.

Exit status 1 if a class differs from plaintext. ResNet-20 needs `cifar10-12k.npz` and
`resnet20-cifar10.safetensors` in the folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from delayed_link import Link
from safetensors.torch import load_file
from torch import Tensor, nn

import fastbcd
from fastbcd import private
from fastbcd.data.npz import load_npz
from fastbcd.private.running import ENGINES, HERE_BOTH, Inference, Place

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the ResNet-20 weights
RELUS = {"small": 200, "resnet20": 8_000}
KINDS = ("identity", "line", "poly", "emptied", "merged")


def dense(name: str, replacement: str) -> tuple[nn.Module, Tensor]:
    """The net with all its ReLUs, and one image [1, 3, s, s]."""
    torch.manual_seed(0)
    if name == "small":
        net = fastbcd.models.resnet20(5, 16, width=4, blocks=1, replacement=replacement)
        return net.eval(), torch.randn(1, 3, 16, 16)
    folder = Path(os.environ.get("FASTBCD_DATA", "data"))
    weights = load_file(folder / "resnet20-cifar10.safetensors")
    net = fastbcd.models.resnet20(10, 32, replacement=replacement)
    net.load_state_dict(weights, strict=False)
    data = load_npz(folder / "cifar10-12k.npz", "test", MEAN, STD)
    return net.eval(), next(data.first(1).batches(1))[0]


def net_of(name: str, kind: str, engine: str) -> tuple[nn.Module, Tensor]:
    """A net of one of KINDS, and an image."""
    replacement = kind if kind in ("line", "poly") else "identity"
    net, image = dense(name, replacement)
    masks = fastbcd.masks(net).copy()
    if kind in ("emptied", "merged"):
        for number, site in enumerate(masks.sites):
            masks.bits[site.start : site.start + site.numel] = number % 4 == 3
    removed = masks.sample(masks.count() - RELUS[name], seed=0, step=0, trial=0)
    fastbcd.set_masks(net, masks.without(removed))
    for module in net.modules():
        if hasattr(module, "coef"):  # near a ReLU, so that values keep their size
            module.coef.data[0] = 0.1
            module.coef.data[1] = 0.5
            module.coef.data[2:] = 0.01
    if kind == "merged":
        data = image, torch.zeros(1, dtype=torch.int64)
        net = private.merge(net, data, engine, epochs=0).net
    return net, image


def row(kind: str, result: Inference, rtt: float) -> str:
    """A line of the table."""
    total, cost = result.total, result.predicted
    assert cost is not None
    predicted = {"bytes": "?", "messages": "?", "seconds": "?"}
    if cost.bytes is not None:
        predicted["bytes"] = f"{cost.bytes / 1e6:.2f}"
    if cost.total.messages is not None:
        predicted["messages"] = f"{cost.total.messages:.0f}"
    if None not in (cost.total.compute, cost.total.rounds):
        seconds = cost.total.compute + cost.total.rounds * rtt
        predicted["seconds"] = f"{seconds:.2f}"
    same = "" if result.agreement["same_class"] == 1 else "  OTHER CLASS"
    return (
        f"{result.engine:<12}{kind:<10}{rtt * 1e3:>6g}"
        f"{total.sent / 1e6:>9.2f}{total.received / 1e6:>9.2f}"
        f"{total.bytes / 1e6:>9.2f}{predicted['bytes']:>9}"
        f"{total.messages:>7}{predicted['messages']:>7}"
        f"{total.seconds:>9.2f}{predicted['seconds']:>9}"
        f"{result.setup.bytes / 1e6:>9.2f}{result.setup.seconds:>8.1f}"
        f"{result.agreement['difference']:>9.0e}{same}"
    )


def named_run(text: str) -> tuple[str, Path]:
    name, _, path = text.rpartition("=")
    return name or Path(path).name, Path(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--net", choices=RELUS, default="small")
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=[*ENGINES])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--nets", type=named_run, nargs="+", default=[])
    parser.add_argument("--rtt", type=float, nargs="+", default=[], help="ms")
    parser.add_argument("--weights-of", choices=("both", "server"), default="both")
    parser.add_argument("--layers", action="store_true")
    options = parser.parse_args()
    heads = ("rtt ms", "sent", "received", "MB", "predicted", "messages", "predicted")
    print(
        f"{options.net}, {RELUS[options.net]:,} ReLUs, one image; weights of {options.weights_of}"
    )
    print(", ".join(heads), "s, predicted, set-up MB, set-up s, logits differ by")
    wrong = 0
    for rtt in options.rtt or [0.0]:
        with Link(one_way=rtt / 2e3) if rtt else Loopback() as link:
            places = tuple(
                Place(place.host, ("taskset", "-c", str(core), *place.command))
                for core, place in enumerate(link.places)
            )
            for engine in options.engines:
                nets = [
                    (kind, *net_of(options.net, kind, engine)) for kind in options.kinds
                ]
                image = dense(options.net, "identity")[1]
                for name, path in options.nets:
                    nets.append((name, fastbcd.load_run(path).model.eval(), image))
                for kind, net, image in nets:
                    result = private.run(
                        net, image, engine, weights_of=options.weights_of, places=places
                    )
                    print(row(kind, result, rtt / 1e3), flush=True)
                    if options.layers:
                        print(result)
                    wrong += result.agreement["same_class"] < 1
    return int(wrong > 0)


class Loopback:
    """Both parties on 127.0.0.1."""

    places = HERE_BOTH

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    raise SystemExit(main())
