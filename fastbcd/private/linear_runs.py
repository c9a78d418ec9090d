"""Linear runs: which values of a net are linear in which earlier ones, and through which window.

Between two sites in use everything is linear: convolutions, batch norms in eval mode, emptied
sites, additions. Values that a run begins with are its sources: the image, the results of sites
in use and of all operations that are not known as linear here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fastbcd.data.for_net import image_shape
from fastbcd.graph.operands import ADDITIONS
from fastbcd.graph.trace import trace, without_inplace
from fastbcd.masking.activations import MaskedActivation, MaskedLine, MaskedReLU
from fastbcd.runtime.dtypes import device_of, dtype_of
from fastbcd.runtime.module_mode import eval_mode

MOVING = (nn.Identity, nn.Dropout, MaskedReLU)
SCALING = (nn.BatchNorm1d, nn.BatchNorm2d, MaskedLine)
MEANS = (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d, torch.mean, "mean")
FLATTENING = (nn.Flatten, torch.flatten, "flatten")


class Kind(IntEnum):
    """What a linear operation does; of several in a row, the largest counts."""

    MOVES = 0  # values take other places
    SCALES = 1  # and each channel is multiplied by a number
    CONVOLVES = 2
    MIXES = 3  # every output reads every input


class Span(NamedTuple):
    """Output r reads inputs from r * stride - before to r * stride + after.

    >>> Span(1, 1, 2).then(Span(1, 1, 1))  # a 3×3 convolution after one of stride 2
    Span(before=3, after=3, stride=2)
    """

    before: int = 0
    after: int = 0
    stride: int = 1

    def then(self, other: Span) -> Span:
        """This operation, and another one after it."""
        before = self.before + other.before * self.stride
        after = self.after + other.after * self.stride
        return Span(before, after, self.stride * other.stride)

    def joined(self, other: Span) -> Span:
        """What both read."""
        before = max(self.before, other.before)
        return Span(before, max(self.after, other.after), self.stride)

    @property
    def size(self) -> int:
        """The size of a kernel that reads this."""
        return self.before + self.after + 1


class Path(NamedTuple):
    """A linear operation, or several in a row."""

    kind: Kind = Kind.MOVES
    rows: Span = Span()
    columns: Span = Span()

    def then(self, other: Path) -> Path:
        """This operation, and another one after it."""
        kind = max(self.kind, other.kind)
        return Path(kind, self.rows.then(other.rows), self.columns.then(other.columns))

    def joined(self, other: Path) -> Path:
        """The sum of two paths from the same source."""
        kind = max(self.kind, other.kind, Kind.CONVOLVES)
        rows = self.rows.joined(other.rows)
        return Path(kind, rows, self.columns.joined(other.columns))


Value = tuple[tuple[str, Path], ...]  # the sources of a value, and the path from each


def joined(values: list[Value], path: Path) -> Value:
    """The value of an operation on the sum of these values."""
    paths: dict[str, Path] = {}
    for source, before in (item for value in values for item in value):
        after = before.then(path)
        if source in paths:
            after = paths[source].joined(after)
        paths[source] = after
    return tuple(sorted(paths.items()))


class LinearRuns:
    """The graph of a net in eval mode with the path of each operation that may be merged.

    >>> runs = LinearRuns(fastbcd.models.resnet20(num_classes=10, image_size=32))
    >>> len(runs.sites), runs.paths["conv1"].rows, runs.paths["mean"].kind.name
    (19, Span(before=1, after=1, stride=1), 'MIXES')
    """

    def __init__(self, net: nn.Module) -> None:
        try:
            with eval_mode(net):
                self.graph = without_inplace(net, trace(net))
        except (
            Exception
        ) as error:  # whatever the net's own forward raises on fx proxies
            raise ValueError(
                f"linear runs of {type(net).__name__} are not known, since torch.fx cannot trace "
                f"it ({error}): rewrite that part of its forward"
            ) from error
        self.modules = dict(net.named_modules())
        self.shapes = self._shapes(net)
        self.nodes = list(self.graph.nodes)
        self.sites: dict[str, str] = {}  # of a node's name: the name of its site
        self.paths: dict[str, Path] = {}
        for node in reversed(self.nodes):  # a mean is merged if what reads it is
            if node.name not in self.shapes:
                continue
            path = self._path(node)
            if path is not None:
                self.paths[node.name] = path
            if isinstance(self.function(node), MaskedActivation):
                self.sites[node.name] = str(node.target)

    def function(self, node: fx.Node) -> Any:
        """The module, function, or name of the method that a node calls."""
        if node.op == "call_module":
            return self.modules[str(node.target)]
        return node.target

    def is_linear(self, node: fx.Node, used: frozenset[str]) -> bool:
        """Whether a node may be merged, if these sites keep a ReLU."""
        return node.name in self.paths and self.sites.get(node.name) not in used

    def may_be_cut(self, node: fx.Node) -> bool:
        """Whether a run may end at a linear node: at emptied sites and where branches begin."""
        branches = len(node.users) > 1
        return node.name in self.sites or branches or self.is_mean(node)

    def is_mean(self, node: fx.Node) -> bool:
        """Whether a node is a mean, which costs less by itself than as a dense map."""
        return _is_one_of(self.function(node), MEANS)

    def _shapes(self, net: nn.Module) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors, without the batch."""
        shape = image_shape(net)
        if shape is None:
            raise ValueError(
                f"{type(net).__name__} has not been used with images: pass the data, or "
                f"convert it with fastbcd.convert"
            )
        example = torch.zeros(2, *shape, dtype=dtype_of(net), device=device_of(net))
        recorder = _Shapes(fx.GraphModule(net, self.graph))
        with eval_mode(net), torch.no_grad():
            recorder.run(example)
        return recorder.shapes

    def _path(self, node: fx.Node) -> Path | None:
        """The path of one node; None: it is not known as linear."""
        function = self.function(node)
        if any(source.name not in self.shapes for source in node.all_input_nodes):
            return None
        if isinstance(function, MOVING):
            return Path(Kind.MOVES)
        if isinstance(function, SCALING):
            tracked = getattr(function, "running_mean", self) is not None
            return Path(Kind.SCALES) if tracked else None
        if isinstance(function, nn.Conv2d):
            return _path_of_convolution(function)
        if isinstance(function, nn.Linear):
            return Path(Kind.MIXES) if len(self.shapes[node.name]) == 1 else None
        if _is_one_of(function, MEANS + FLATTENING):
            leads = all(
                self.paths.get(user.name) == Path(Kind.MIXES) for user in node.users
            )
            whole = len(self.shapes[node.name]) == 1 or function == nn.AdaptiveAvgPool2d
            return Path(Kind.MIXES) if leads and whole else None
        return self._path_of_function(node)

    def _path_of_function(self, node: fx.Node) -> Path | None:
        inputs = node.all_input_nodes
        shapes = {self.shapes[source.name] for source in inputs}
        if node.target in ADDITIONS:
            plain = len(node.args) == len(inputs) == 2 and not node.kwargs
            return Path() if plain and len(shapes) == 1 else None
        if node.target is F.pad and len(node.args) == 2:
            widths: Any = node.args[1]
            of_channels = len(widths) == 6 and not any(widths[:4]) and min(widths) >= 0
            return Path() if of_channels else None
        if node.target is operator.getitem:
            index: Any = node.args[1]
            whole = slice(None, None, None)
            if (
                isinstance(index, tuple)
                and len(index) == 4
                and index[:2] == (whole, whole)
            ):
                return _path_of_slices(*index[2:])
        return None


class _Shapes(fx.Interpreter):
    """Runs a graph and keeps the shapes of its tensors, without the batch."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op != "get_attr" and value.ndim > 1:
            self.shapes[n.name] = tuple(value.shape[1:])
        return value


def _is_one_of(function: Any, kinds: tuple[Any, ...]) -> bool:
    return function in kinds or type(function) in kinds


def _path_of_convolution(module: nn.Conv2d) -> Path | None:
    if (
        module.groups > 1
        or module.padding_mode != "zeros"
        or isinstance(module.padding, str)
    ):
        return None
    spans = []
    for size, padding, dilation, stride in zip(
        module.kernel_size, module.padding, module.dilation, module.stride, strict=True
    ):
        spans.append(Span(padding, (size - 1) * dilation - padding, stride))
    if min(span.after for span in spans) < 0:
        return None
    return Path(Kind.CONVOLVES, *spans)


def _path_of_slices(rows: Any, columns: Any) -> Path | None:
    spans = []
    for part in (rows, columns):
        if not isinstance(part, slice) or (part.start, part.stop) != (None, None):
            return None
        if not isinstance(part.step, int | None):
            return None
        spans.append(Span(stride=part.step or 1))
    return Path(Kind.MOVES, *spans)
