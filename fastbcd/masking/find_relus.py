"""Which calls of a traced network `convert` replaces: every ReLU, except those of skip=."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import fx, nn

from fastbcd.masking.missed_relus import Op, Watch
from fastbcd.masking.tracing import BY_HAND, ConversionError, call_path

Skip = str | type[nn.Module]


class Relus(NamedTuple):
    """The ReLU calls to replace, and the names of the nonlinear calls that skip= names."""

    masked: dict[fx.Node, Op]
    skipped: set[str]


def require(condition: bool, message: str) -> None:
    """Raise a ConversionError with this message unless the condition is true."""
    if not condition:
        raise ConversionError(message)


def checked_skips(skip: Any) -> tuple[Skip, ...]:
    """The entries of skip=, each a name or a type of modules."""
    entries = (skip,) if isinstance(skip, str | type) else tuple(skip)
    for entry in entries:
        is_module = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not isinstance(entry, str) and not is_module:
            raise TypeError(f"skip has {entry!r}; give names such as 'layer4.*', or module types")
    return entries


def find_relus(net: nn.Module, watch: Watch, leaves: set[str], skips: tuple[Skip, ...]) -> Relus:
    """The ReLU calls of a net that was watched; leaves: modules that are called as a whole."""
    relus: dict[fx.Node, Op] = {}
    skipped: dict[str, bool] = {}  # by the name of each nonlinear call
    for node, ops in watch.ops.items():
        name = call_path(node)
        kind = _kind(net, node)
        relu = next((op for op in ops if op.relu), None)
        if any(op.nonlinear for op in ops):
            kinds = {*kind.__mro__, *(relu.relu.__mro__ if relu and relu.relu else ())}
            skipped[name] = skipped.get(name, False) or _is_skipped(name, kinds, skips)
        if relu is None:
            continue
        has_gradient = hasattr(node.target, "gradient")  # an autograd Function
        alone = len(ops) == 1 and name not in leaves and not has_gradient
        if alone or kind is nn.ReLU:  # hooks are kept
            relus[node] = relu
        elif not skipped[name]:
            differs = "and something else in training than in evaluation "
            raise ConversionError(
                f"a ReLU was not captured: {name!r} ({kind.__name__}) computes {relu.name} "
                f"{differs if name in leaves else ''}inside; {BY_HAND}"
            )
    _check_names(skips, skipped, relus)
    masked = {node: op for node, op in relus.items() if not skipped[call_path(node)]}
    _check_kinds(masked)
    if not masked:
        others = watch.nonlinear(without=relus)
        raise ConversionError(f"{type(net).__name__} {_no_relu(skips, others)}")
    return Relus(masked, {name for name, is_skipped in skipped.items() if is_skipped})


def _kind(net: nn.Module, node: fx.Node) -> type:
    """The type of the module or function that a node calls."""
    if node.op == "call_module":
        return type(net.get_submodule(str(node.target)))
    return type(node.target)


def _is_skipped(name: str, kinds: set[type], skips: Iterable[Skip]) -> bool:
    return any(
        fnmatchcase(name, entry) if isinstance(entry, str) else entry in kinds for entry in skips
    )


def _check_names(skips: Iterable[Skip], skipped: Iterable[str], relus: Iterable[fx.Node]) -> None:
    """Refuse a name of skip= that no nonlinear call has."""
    for entry in skips:
        if isinstance(entry, str) and not any(fnmatchcase(name, entry) for name in skipped):
            names = list(dict.fromkeys(map(call_path, relus)))
            more = ", …" if len(names) > 20 else ""
            raise ConversionError(
                f"skip={entry!r} is the name of no ReLU; the ReLUs are "
                f"{', '.join(names[:20])}{more}"
            )


def _check_kinds(relus: dict[fx.Node, Op]) -> None:
    """Refuse ReLU6."""
    names = [call_path(node) for node, op in relus.items() if op.relu is nn.ReLU6]
    if names:
        raise ConversionError(
            f"{len(names)} ReLU6 calls cannot be masked, the first is {names[0]!r}: "
            f"ReLU6 is bounded on both sides; train with ReLU, or leave them: skip=[nn.ReLU6]"
        )


def _no_relu(skips: tuple[Skip, ...], others: tuple[Any, ...]) -> str:
    """What a net without a ReLU to mask has instead."""
    text = "has no ReLU to mask"
    if skips:
        names = [entry if isinstance(entry, str) else entry.__name__ for entry in skips]
        text += f" besides those skipped ({', '.join(names)})"
    if others:
        clamps = all(op.kind.startswith("clamp") for op in others)
        kind = "ReLUs are clamps" if clamps else "nonlinear operations are"
        text += (
            f"; its {kind} {'; '.join(map(str, others[:3]))}; captured are relu, clamp(min=0) "
            f"without max, threshold(0, 0) and maximum(x, zeros)"
        )
    return text
