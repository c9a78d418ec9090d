"""merge: a net whose linear runs are single convolutions, cut where its protocol costs least.

Where sites are empty, everything between two sites in use is one linear map: convolutions, batch
norms, lines, additions. Merged, fewer layers are paid for; but kernels grow, so runs are cut.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from fastbcd.data.for_net import data_for, image_shape, remember_shape
from fastbcd.masking.masks import mask_modules, masks
from fastbcd.private.costs import Cost, seconds_text
from fastbcd.private.cuts import Cutting
from fastbcd.private.linear_runs import LinearRuns, Path, Value, joined
from fastbcd.private.merged_maps import Maps
from fastbcd.private.protocols import Protocol
from fastbcd.private.target import Target
from fastbcd.private.units import si
from fastbcd.runtime.validate import check_number
from fastbcd.scoring.accuracy import accuracy
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.settings import Finetune

TUNING = Finetune(lr=1e-3, batch_size=25)


@dataclass(frozen=True)
class Merged:
    """A merged net with its accuracy and cost, before and after; `str` gives a table.

    >>> net = fastbcd.models.resnet20(num_classes=3, image_size=8, width=2, blocks=1)
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without(range(1, 576)))
    >>> data = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    >>> merged = merge(net, data, epochs=0)
    >>> [cost.rounds for cost in merged.costs]
    [18.0, 12.0]
    """

    net: nn.Module
    cuts: tuple[str, ...]  # the graph's names of the values at which runs end
    accuracies: tuple[float, float]
    costs: tuple[Cost, Cost]

    def __str__(self) -> str:
        lines = [f"{len(self.cuts)} cuts: {', '.join(self.cuts) or 'none'}"]
        results = zip(("before", "merged"), self.accuracies, self.costs, strict=True)
        for title, percent, cost in results:
            total = cost.total
            lines.append(
                f"{title}: {percent:.2f} %, {si(total.bytes, 'B')}, {si(total.messages)} messages "
                f"each way, {seconds_text(cost)}"
            )
        return "\n".join(lines)


def merge(
    net: nn.Module,
    data: Any,
    protocol: str | Protocol | Target = "crypten",
    *,
    epochs: float = 2,
    test: Any = None,
    finetune: Finetune = TUNING,
    teacher: nn.Module | None = None,
) -> Merged:
    """A copy of the net with merged linear runs, fine-tuned; the net is not changed.

    Args:
        net: with masks. What torch.fx cannot trace is refused.
        data: to fine-tune on.
        protocol: a protocol on a LAN, by seconds; or a `Target` with another connection or
            quantity, by which the cuts are found. Of the target only these are read.
        epochs: of fine-tuning; the zeros around merged convolutions differ from the net's.
        test: images that accuracies are measured on; None: data.
        finetune: its settings, except the epochs.
        teacher: whose logits are distilled; None: those of the net before.

    >>> net = fastbcd.models.resnet20(num_classes=3, image_size=8, width=2, blocks=1)
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without(range(1, 576)))
    >>> data = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    >>> merged = merge(net, data, "spu-cheetah", epochs=0)
    >>> merged.costs[1].bytes < merged.costs[0].bytes
    True
    """
    check_number("epochs", epochs, 0)
    target = protocol
    if not isinstance(target, Target):
        target = Target(seconds=0, protocol=target)
    images = data_for(net, data)
    measured_on = images if test is None else test
    used = frozenset(name for name, count in masks(net).counts().items() if count)
    if not used:
        raise ValueError(
            "the net keeps no ReLU: it is one linear map; give one that keeps some"
        )
    runs = LinearRuns(net)
    cuts = Cutting(runs, target.price_of).best(used).nodes
    twin = merged_at(net, runs, cuts)
    before = accuracy(net, measured_on)
    if epochs:
        settings = replace(finetune, epochs=epochs)
        Finetuner(twin, images, settings, teacher or net).run(step=0)
    return Merged(
        twin,
        tuple(sorted(cuts)),
        (before, accuracy(twin, measured_on)),
        (target.whole_cost(net), target.whole_cost(twin)),
    )


def merged_at(net: nn.Module, runs: LinearRuns, cuts: frozenset[str]) -> nn.Module:
    """The net with its linear runs merged, where runs end at sites in use and at these cuts."""
    used = frozenset(name for name, count in masks(net).counts().items() if count)
    linear = {
        n.name for n in runs.nodes if runs.is_linear(n, used) and n.name not in cuts
    }
    maps = Maps(net, runs, linear)
    twin = copy.deepcopy(net)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}  # by the names of sources
    values: dict[str, Value] = {}

    def materialised(node: fx.Node) -> fx.Node:
        """The node of the new graph with the value of one of the net's."""
        if node.name not in made:
            made[node.name] = add_map(node, values[node.name])
        return made[node.name]

    def add_map(node: fx.Node, value: Value) -> fx.Node:
        name = f"to_{node.name}"
        twin.add_module(name, maps.map_to(node, value))
        return graph.call_module(name, tuple(made[source] for source, _ in value))

    for node in runs.nodes:
        stays = node.name in cuts and runs.is_mean(node)
        if runs.is_linear(node, used) and not stays:
            inputs = [values[source.name] for source in node.all_input_nodes]
            values[node.name] = joined(inputs, runs.paths[node.name])
            if node.name not in cuts:
                continue
            made[node.name] = add_map(node, values[node.name])
        else:
            made[node.name] = graph.node_copy(node, materialised)
        values[node.name] = ((node.name, Path()),)
    model = fx.GraphModule(twin, graph, type(net).__name__)
    _describe(model, net, used)
    return model.train(net.training)


def _describe(model: fx.GraphModule, net: nn.Module, used: frozenset[str]) -> None:
    """Note the order of the sites in use, and the shape of images, as `convert` does."""
    for number, act in enumerate(mask_modules(net)):
        if act in used:
            model.get_submodule(act).order = number  # type: ignore[assignment]
    shape = image_shape(net)
    model.example_shape = shape  # type: ignore[assignment]
    if shape is not None:
        remember_shape(model, shape)
