"""Whole private inferences of ResNet-20: SNL, linearize, linearize for a target; each merged, too.

    FASTBCD_DATA=folder python benchmarks/whole_inference.py               # the table, predicted
    FASTBCD_DATA=folder python benchmarks/whole_inference.py --measure     # and run by two parties
    python benchmarks/whole_inference.py --quick --measure                 # a tiny net, minutes

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. The dense net, SNL and
linearize at 8,000 ReLUs (the settings of methods.py, whose runs below --out are read if they
are there), and linearize for a `Target` of the merged net under Cheetah. Each is also merged
for each protocol, with `--tune` epochs of fine-tuning. `--measure` needs the engines, see
docs/private-inference.md.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any

from methods import snl
from safetensors.torch import load_file, save_file
from torch import nn

import fastbcd
from arms import Arm, add_options, problem_of
from fastbcd import private
from fastbcd.private.units import columns, si
from table import machine

PROTOCOLS = ("spu-cheetah", "spu-semi2k", "crypten")
LAN = {"bandwidth": "1Gbit", "rtt": "1ms"}


def nets_of(problem: Any, o: argparse.Namespace) -> dict[str, nn.Module]:
    """The nets of all arms, trained or read."""
    works: dict[str, Any] = {
        f"SNL {o.budget}": (0.01, lambda arm: snl(arm, o.budget)),
        f"linearize {o.budget}": (0.003, lambda arm: arm.linearize(o.budget, lr=0.003)),
    }
    for seconds in o.seconds:
        target = private.Target(seconds, protocol="spu-cheetah", **LAN, merged=True)
        works[f"linearize {seconds} s"] = (
            0.003,
            lambda arm, target=target: arm.linearize(target, lr=0.003),
        )
    nets = {"dense": problem.dense}
    for name, (lr, work) in works.items():
        if o.only and o.only not in name:
            continue
        arm = Arm(problem, argparse.Namespace(**{**vars(o), "lr": lr}), name, 0)
        arm.result(partial(_facts, work))
        nets[name] = saved(arm.folder, problem, "SNL" in name)
    return nets


def _facts(work: Any, arm: Arm) -> dict[str, Any]:
    work(arm)
    return {}


def saved(folder: Path, problem: Any, identity: bool) -> nn.Module:
    """The net of a finished arm."""
    replacement = "identity" if identity else "line"
    net = fastbcd.models.build(**problem.dense.arch | {"replacement": replacement})
    net.load_state_dict(load_file(folder / "net.safetensors"), strict=False)
    fastbcd.set_masks(net, fastbcd.MaskSet.load(folder / "masks.safetensors"))
    return net.eval()


def merged(
    net: nn.Module, protocol: str, problem: Any, o: Any, path: Path
) -> nn.Module:
    """The net merged for a protocol and fine-tuned, kept in a file."""
    target = private.Target(seconds=0, protocol=protocol, **LAN)
    epochs = 0 if path.exists() else o.tune
    twin = private.merge(
        net, problem.train, target, epochs=epochs, test=problem.test.first(2)
    ).net
    if path.exists():
        twin.load_state_dict(load_file(path))
    else:
        save_file({k: t.contiguous() for k, t in twin.state_dict().items()}, path)
    return twin.eval()


def row(name: str, net: nn.Module, protocol: str, problem: Any, o: Any) -> list[str]:
    cost = private.cost(net, protocol, **LAN)
    percent = fastbcd.accuracy(net, problem.test)
    used = sum(count > 0 for count in fastbcd.masks(net).counts().values())
    cells = [f"{protocol}, {name}", f"{percent:.2f}", f"{cost.relus:,}", str(used)]
    cells += [si(cost.bytes, "B"), si(cost.total.messages), si(cost.total.compute, "s")]
    if o.measure:
        ran = private.run(net, next(problem.test.batches(1))[0], engine=protocol)
        total = ran.total
        cells += [si(total.bytes, "B"), si(total.messages), si(total.seconds, "s")]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, batch=25)
    parser.add_argument("--budget", type=int, default=8_000, help="ReLUs (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, nargs="*", default=[13.0], help="of targets"
    )
    parser.add_argument("--tune", type=float, default=2, help="epochs after merging")
    parser.add_argument(
        "--only", default="", help="train the arms with this in their names alone"
    )
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=PROTOCOLS)
    parser.add_argument(
        "--measure", action="store_true", help="run two parties as well"
    )
    parser.set_defaults(images=5_000, samples=500, epochs=30, final=5)
    o = parser.parse_args()
    if o.quick:
        vars(o).update(images=128, samples=64, epochs=4, final=2, dense_epochs=2, tune=0,
                       width=4, budget=200, seconds=[5.5])  # fmt: skip
    name = "whole-quick" if o.quick else "methods-resnet20"
    o.out = o.out or Path("runs") / name
    problem = problem_of(o)
    print(machine())
    nets = nets_of(problem, o)
    heads = ["", "test %", "ReLUs", "sites", "MB", "messages", "compute"]
    rows = [heads + ["ran MB", "ran msgs", "ran s"] * int(o.measure)]
    for protocol in o.protocols:
        for name, net in nets.items():
            versions = {name: copy.deepcopy(net)}
            if name != "dense":
                path = o.out / f"merged-{name}-{protocol}.safetensors".replace(" ", "-")
                versions[f"{name}, merged"] = merged(net, protocol, problem, o, path)
            for title, version in versions.items():
                rows.append(row(title, version, protocol, problem, o))
                print(*rows[-1], sep="  ", flush=True)
    print("\n".join(columns(rows, width=11)))


if __name__ == "__main__":
    main()
