"""Which calls of a traced network `convert` replaces: every ReLU, except those of skip=."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.missed_relus import Op, Watch
from fastbcd.masking.tracing import BY_HAND, call_path, require

Skip = str | type[nn.Module]


def checked_skips(skip: Any) -> tuple[Skip, ...]:
    """The entries of skip=, each a name or a type of modules."""
    entries = (skip,) if isinstance(skip, str | type) else tuple(skip)
    for entry in entries:
        is_module = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not isinstance(entry, str) and not is_module:
            raise TypeError(
                f"skip has {entry!r}; give names such as 'layer4.*', or module types"
            )
    return entries


def find_relus(
    net: nn.Module, watch: Watch, leaves: set[str], skips: tuple[Skip, ...]
) -> tuple[dict[fx.Node, Op], set[str]]:
    """The ReLU calls to mask in a net that was watched, and the names of calls that are skipped.

    leaves: modules that are called as a whole.
    """
    relus: dict[fx.Node, Op] = {}
    names: dict[str, None] = {}  # of all ReLU calls
    nonlinear: set[str] = set()  # the names of all calls that skip= may name
    skipped: set[str] = set()
    for node, ops in watch.ops.items():
        name = call_path(node)
        kind = _kind(net, node)
        relu = next((op for op in ops if op.relu), None)
        if any(op.elements for op in ops):
            nonlinear.add(name)
            if _is_skipped(name, kind, relu, skips):
                skipped.add(name)
        if relu is None:
            continue
        names[name] = None
        has_gradient = hasattr(node.target, "gradient")  # an autograd Function
        alone = len(ops) == 1 and name not in leaves and not has_gradient
        if name in skipped:
            continue
        differs = (
            "and something else in training than in evaluation "
            if name in leaves
            else ""
        )
        require(
            alone,
            f"a ReLU was not captured: {name!r} ({kind.__name__}) computes {relu.kind} {differs}"
            f"inside; {BY_HAND}",
        )
        require(
            relu.relu is not nn.ReLU6,
            f"{name!r} is a ReLU6, which cannot be masked: it is bounded on both sides; train with "
            f"ReLU, or leave it: skip=[nn.ReLU6]",
        )
        relus[node] = relu
    for entry in skips:
        require(
            isinstance(entry, type)
            or any(fnmatchcase(name, entry) for name in nonlinear),
            f"skip={entry!r} is the name of no ReLU; the ReLUs are {', '.join(names)}",
        )
    require(bool(relus), f"{type(net).__name__} {_no_relu(net, watch, skips)}")
    return relus, skipped


def _kind(net: nn.Module, node: fx.Node) -> type:
    """The type of the module or function that a node calls."""
    if node.op == "call_module":
        return type(net.get_submodule(str(node.target)))
    return type(node.target)


def _is_skipped(name: str, kind: type, relu: Op | None, skips: Iterable[Skip]) -> bool:
    kinds = kind.__mro__
    if relu is not None and relu.relu is not None:  # F.relu is skipped with nn.ReLU
        kinds += relu.relu.__mro__
    return any(
        fnmatchcase(name, entry) if isinstance(entry, str) else entry in kinds
        for entry in skips
    )


def _no_relu(net: nn.Module, watch: Watch, skips: tuple[Skip, ...]) -> str:
    """What a net without a ReLU to mask has instead."""
    text = "has no ReLU to mask"
    if any(isinstance(module, MaskedActivation) for module in net.modules()):
        text = "has masks already, by fastbcd.convert or by hand, and no other ReLU"
    if skips:
        text += f" besides those of skip={skips}"
    others = watch.nonlinear(without=())
    if others:
        text += f"; its nonlinear operations are {'; '.join(map(str, others[:3]))}"
    return f"{text}; ReLUs are relu, clamp(min=0) without max and threshold(0, 0)"
