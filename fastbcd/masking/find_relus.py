"""Which calls of a traced network `convert` replaces: every ReLU, except those of skip=."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.missed_relus import SMOOTH, Op, Watch
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
        relu = next((op for op in ops if op.activation in (nn.ReLU, nn.ReLU6)), None)
        if relu is not None:
            names[name] = None
        if any(op.elements for op in ops):
            nonlinear.add(name)
        if name in nonlinear and is_skipped(net, node, ops, skips):
            skipped.add(name)
        elif relu is not None:
            _check_masked(net, node, ops, relu, name in leaves)
            relus[node] = relu
    for entry in skips:
        require(
            isinstance(entry, type)
            or any(fnmatchcase(name, entry) for name in nonlinear),
            f"skip={entry!r} is the name of no ReLU; the ReLUs are {', '.join(names)}",
        )
    require(bool(relus), f"{type(net).__name__} {_no_relu(net, watch, skips)}")
    return relus, skipped


def _check_masked(
    net: nn.Module, node: fx.Node, ops: list[Op], relu: Op, whole: bool
) -> None:
    """Refuse a ReLU that cannot be masked; whole: inside a module that is called as a whole."""
    name = call_path(node)
    differs = ""
    if whole:
        differs = "and something else in training than in evaluation "
    has_gradient = hasattr(node.target, "gradient")  # an autograd Function
    require(
        len(ops) == 1 and not whole and not has_gradient,
        f"a ReLU was not captured: {name!r} ({_kind(net, node).__name__}) computes {relu.kind} "
        f"{differs}inside; {BY_HAND}",
    )
    require(
        relu.activation is not nn.ReLU6,
        f"{name!r} is a ReLU6, which cannot be masked: it is bounded on both sides; convert it to "
        f"a ReLU with relu6='relu' and fine-tune, or leave it: skip=[nn.ReLU6]",
    )


def _kind(net: nn.Module, node: fx.Node) -> type:
    """The type of the module or function that a node calls."""
    if node.op == "call_module":
        return type(net.get_submodule(str(node.target)))
    return type(node.target)


def is_skipped(
    net: nn.Module, node: fx.Node, ops: Iterable[Op], skips: Iterable[Skip]
) -> bool:
    """Does skip= name this call, or its type? F.relu has the type nn.ReLU."""
    kinds = _kind(net, node).__mro__
    for op in ops:
        if op.activation is not None:
            kinds += op.activation.__mro__
    names = [entry for entry in skips if isinstance(entry, str)]
    by_name = any(fnmatchcase(call_path(node), name) for name in names)
    return by_name or any(entry in kinds for entry in skips)


def _no_relu(net: nn.Module, watch: Watch, skips: tuple[Skip, ...]) -> str:
    """What a net without a ReLU to mask has instead."""
    text = "has no ReLU to mask"
    if any(isinstance(module, MaskedActivation) for module in net.modules()):
        text = "has masks already, by fastbcd.convert or by hand, and no other ReLU"
    if skips:
        text += f" besides those of skip={skips}"
    others = watch.nonlinear()
    if others:
        text += f"; its nonlinear operations are {'; '.join(map(str, others[:3]))}"
    if any(op.kind in SMOOTH for ops in watch.ops.values() for op in ops):
        text += (
            "; smooth='relu' makes ReLUs of SiLU, GELU, Hardswish and Mish, to be fine-tuned, "
            "and skip= leaves some of them"
        )
    return f"{text}; ReLUs are relu, clamp(min=0) without max and threshold(0, 0)"
