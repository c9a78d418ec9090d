"""A net as an artefact: its gather form, exported to ATen operations, as a few kinds of operations.

two_party/artefact.py describes the file. Whatever moves values without changing them (reshaping,
slices, padding, concatenation, gathering, writing back) is one static list of positions; such moves
are joined until a computation needs their result.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastbcd.graph.trace import logits_of
from fastbcd.masking.activations import MaskedActivation
from fastbcd.private.gathering import gather_form
from fastbcd.private.two_party.artefact import Artefact
from fastbcd.runtime.module_mode import eval_mode

TOLERANCE = 1e-4  # of logits in float32, relative to the largest
PUBLIC = "coef"  # what the lines and quadratics of removed ReLUs are, which cost() takes as public
COPIES = {"clone", "_to_copy", "alias", "detach", "dropout", "lift_fresh_copy"}
MOVES = {
    "cat", "constant_pad_nd", "expand", "flip", "index_put", "index_select", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "stack", "transpose", "unsqueeze", "view",
    "reshape", "_unsafe_view", "t",
}  # fmt: skip


class Elements(NamedTuple):
    """Secret values [1, ...]: elements of computed values, at static positions."""

    sources: tuple[str, ...]
    positions: (
        Tensor  # in the flattened sources, one after the other, from 1; 0 is a zero
    )
    layer: str


class Fixed(NamedTuple):
    """A tensor of the net."""

    tensor: Tensor
    secret: bool


def artefact_of(net: nn.Module, images: Tensor) -> Artefact:
    """The artefact of a net, compared on the images [B, ...] with the net itself.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([1]))
    >>> artefact = artefact_of(net, torch.randn(5, 4))
    >>> [operation["kind"] for operation in artefact.operations]
    ['product', 'take', 'relu', 'take', 'product']
    """
    if images.dtype != torch.float32:
        raise ValueError(
            f"images are {images.dtype}; an artefact has float32 numbers: give "
            f"net.float() and images.float()"
        )
    masked = any(isinstance(module, MaskedActivation) for module in net.modules())
    small = gather_form(net) if masked else copy.deepcopy(net)
    small.eval()
    translation = Translation(_Logits(small), images[:1])
    artefact = Artefact.of(
        translation.operations,
        translation.tensors,
        secret=translation.secret,
        image=images.shape[1:],
    )
    with eval_mode(net), torch.no_grad():
        expected = logits_of(net(images)).cpu().numpy()
    if not np.isfinite(expected).all():
        raise ValueError(
            "the net's own logits on these images are not finite, so the artefact could not be "
            "checked: give images like those of its data, and see fastbcd.private.ranges"
        )
    again = Artefact.read(artefact.written(), "the artefact").logits(
        images.cpu().numpy()
    )
    artefact.about["checked"] = compared(again, expected)
    difference = artefact.about["checked"]["difference"]
    if not difference <= TOLERANCE:  # NaN, too
        raise RuntimeError(
            f"the artefact would give other logits than the net, by {difference:.2g} of the "
            f"largest; please report this with the net"
        )
    return artefact


def compared(logits: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """How far logits are from those expected, both [B, classes].

    >>> compared(np.array([[0.0, 2.0]]), np.array([[0.0, 4.0]]))
    {'images': 1, 'difference': 0.5, 'same_class': 1.0}
    """
    largest = float(np.abs(expected).max())
    same = logits.argmax(1) == expected.argmax(1)
    return {
        "images": len(expected),
        "difference": float(np.abs(logits - expected).max()) / max(largest, 1e-30),
        "same_class": float(same.mean()),
    }


class _Logits(nn.Module):
    """The net, returning its logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return logits_of(self.net(x))


class Translation:
    """The operations and tensors of a net for images of one shape."""

    def __init__(self, net: nn.Module, image: Tensor) -> None:
        self.operations: list[dict[str, Any]] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.secret: list[str] = []
        self.shapes: dict[
            str, torch.Size
        ] = {}  # of what is computed, without the batch
        self.taken: dict[int, tuple[Elements, str]] = {}  # the names of moved values
        program = _program(net, image)
        values = self._inputs(program, image)
        for node in program.graph.nodes:
            if node.op == "call_function":
                values[node] = self._translated(node, values)
        logits = [values[node] for node in program.graph.output_node().args[0]]
        if len(logits) != 1 or not isinstance(logits[0], Elements):
            raise ValueError("the net must return one tensor of logits for an artefact")
        name = self._name(logits[0])
        if not self.operations or self.operations[-1]["name"] != name:
            self._emit("take", "logits", [name], logits[0].positions.shape)

    def _inputs(self, program: Any, image: Tensor) -> dict[fx.Node, Any]:
        """The net's tensors, and the image."""
        tensors = {**program.state_dict, **program.constants}
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        values: dict[fx.Node, Any] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            target = specs[node.name].target
            if target is None:
                values[node] = self._computed("image", image.shape[1:], "image")
                continue
            tensor = tensors[target].detach().cpu()
            public = target.rpartition(".")[2] == PUBLIC
            secret = tensor.is_floating_point() and not public
            values[node] = Fixed(tensor, secret)
        return values

    def _translated(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """The node's value."""
        arguments: Any
        options: Any
        arguments = fx.map_arg(node.args, values.__getitem__)
        options = fx.map_arg(node.kwargs, values.__getitem__)
        target: Any = node.target
        operator = getattr(target, "overloadpacket", target).__name__
        layer = _layer_of(node, operator)
        if operator == "getitem":
            return arguments[0][arguments[1]]
        leaves = tree_flatten((arguments, options), is_leaf=_is_ours)[0]
        if not any(isinstance(leaf, Elements) for leaf in leaves):
            return _folded(target, arguments, options)
        if operator in COPIES or operator.startswith("_assert"):
            return arguments[0]
        if operator in MOVES:
            return self._moved(target, arguments, options, layer)
        if operator == "_native_batch_norm_legit_no_training":
            return [self._normalised(node, layer, arguments)]
        if operator == "max_pool2d_with_indices":
            return [self._max_pooled(layer, *arguments)]
        function = getattr(self, f"_of_{operator}", None)
        if function is None:
            raise ValueError(
                f"{operator} at {layer!r} is not among the operations of an artefact: "
                f"use .onnx or .pt2, or replace it"
            )
        return function(layer, *arguments, **options)

    # ------------------------------------------------------------------ what is emitted

    def _emit(
        self, kind: str, layer: str, of: Sequence[Any], shape: Any, **more: Any
    ) -> Elements:
        """Add an operation. of: values, or names of values and tensors; shape: with the batch."""
        names = [
            self._name(item) if isinstance(item, Elements) else item for item in of
        ]
        name = f"v{len(self.operations)}"
        self.operations.append(
            {"name": name, "kind": kind, "layer": layer, "of": names, **more}
            | {"shape": list(shape[1:])}
        )
        return self._computed(name, shape[1:], layer)

    def _computed(self, name: str, shape: Sequence[int], layer: str) -> Elements:
        """All of what is computed under this name."""
        self.shapes[name] = torch.Size(shape)
        positions = torch.arange(1, self.shapes[name].numel() + 1)
        return Elements((name,), positions.view(1, *shape), layer)

    def _name(self, value: Elements) -> str:
        """The name of a value, which is taken from its sources now if it was only moved so far."""
        key = id(value.positions)
        if key in self.taken:
            return self.taken[key][1]
        original = value
        value = self._without_unused(value)
        source = value.sources[0]
        shape = value.positions.shape[1:]
        in_order = self._in_order(value)
        if in_order and self.shapes[source] == shape:
            return source
        more = {}
        if not in_order:
            positions = value.positions.flatten() - 1
            more["index"] = self._store(positions.int().numpy(), secret=False)
        made = self._emit("take", value.layer, value.sources, (1, *shape), **more)
        self.taken[key] = (original, made.sources[0])
        return made.sources[0]

    def _in_order(self, value: Elements) -> bool:
        """Is it all of one computed value, in another shape at most?"""
        count = self.shapes[value.sources[0]].numel()
        flat = value.positions.flatten()
        return len(value.sources) == 1 and torch.equal(flat, torch.arange(1, count + 1))

    def _moved(self, function: Any, arguments: Any, options: Any, layer: str) -> Any:
        """What a function that only moves values makes of them: it is called on positions."""
        leaves, tree = tree_flatten((arguments, options), is_leaf=_is_ours)
        values = [leaf for leaf in leaves if isinstance(leaf, Elements)]
        sources = tuple(
            dict.fromkeys(name for value in values for name in value.sources)
        )
        given = []
        for leaf in leaves:
            if isinstance(leaf, Elements):
                leaf = self._renumbered(leaf, sources)
            elif isinstance(leaf, Fixed):
                if leaf.tensor.is_floating_point():
                    raise ValueError(
                        f"{layer!r} puts constants among values, which an artefact lacks"
                    )
                leaf = leaf.tensor
            given.append(leaf)
        arguments, options = tree_unflatten(given, tree)
        result = function(*arguments, **options)
        return _wrapped(result, lambda positions: Elements(sources, positions, layer))

    def _renumbered(self, value: Elements, sources: tuple[str, ...]) -> Tensor:
        """The positions of a value among other sources, which include its own."""
        starts = {}
        end = 1
        for name in sources:
            starts[name] = end
            end += self.shapes[name].numel()
        table = [torch.zeros(1, dtype=torch.int64)]
        for name in value.sources:
            table.append(starts[name] + torch.arange(self.shapes[name].numel()))
        return torch.cat(table)[value.positions]

    def _without_unused(self, value: Elements) -> Elements:
        """The same, of the sources that it has elements of."""
        used = []
        end = 1
        for name in value.sources:
            begin = end
            end += self.shapes[name].numel()
            if ((value.positions >= begin) & (value.positions < end)).any():
                used.append(name)
        kept = tuple(used)
        if kept == value.sources or not kept:
            return value
        # positions in the kept sources, by positions in all of them
        table = torch.zeros(end, dtype=torch.int64)
        table[self._renumbered(self._whole(kept), value.sources)] = torch.arange(
            1, self._whole(kept).positions.numel() + 1
        )
        return Elements(kept, table[value.positions], value.layer)

    def _whole(self, sources: tuple[str, ...]) -> Elements:
        """All elements of some sources, in order."""
        count = sum(self.shapes[name].numel() for name in sources)
        return Elements(sources, torch.arange(1, count + 1), "")

    def _store(self, array: np.ndarray, secret: bool) -> str:
        """Keep a tensor; its name."""
        name = f"t{len(self.tensors)}"
        self.tensors[name] = np.ascontiguousarray(array)
        if secret:
            self.secret.append(name)
        return name

    def _constant(self, constant: Fixed) -> str:
        return self._store(constant.tensor.float().numpy(), constant.secret)

    # ------------------------------------------------------------------ linear layers

    def _of_convolution(
        self,
        layer: str,
        x: Elements,
        weight: Fixed,
        bias: Fixed | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        _: Any,
        groups: int,
    ) -> Elements:
        if transposed or len(stride) != 2:
            raise ValueError(f"{layer!r} is no plain Conv2d, which an artefact needs")
        example = torch.zeros(x.positions.shape)
        result = torch.nn.functional.conv2d(
            example, weight.tensor, None, stride, padding, dilation, groups
        )
        channels = weight.tensor.shape[0]
        values = torch.zeros(channels) if bias is None else bias.tensor
        names = [
            self._constant(weight),
            self._store(values.view(-1, 1, 1).numpy(), secret=True),
        ]
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        return self._emit(
            "convolution",
            layer,
            [x, *names],
            result.shape,
            options={**options, "groups": groups},
        )

    def _of_addmm(
        self, layer: str, bias: Fixed, x: Elements, weight: Fixed
    ) -> Elements:
        if len(x.positions) != 1 or isinstance(weight, Elements):
            raise ValueError(
                f"the product at {layer!r} is not one of a row for each image and weights, "
                f"which an artefact needs"
            )
        names = [self._constant(weight), self._constant(bias)]
        return self._emit("product", layer, [x, *names], (1, weight.tensor.shape[1]))

    def _of_mm(self, layer: str, x: Elements, weight: Fixed) -> Elements:
        zeros = Fixed(torch.zeros(weight.tensor.shape[1]), secret=True)
        return self._of_addmm(layer, zeros, x, weight)

    def _normalised(self, node: fx.Node, layer: str, arguments: Any) -> Elements:
        """A batch norm: a part of the layer before, if nothing else reads that."""
        x, weight, bias, mean, variance, _, epsilon = arguments
        scale = (variance.tensor.double() + epsilon).rsqrt()
        if weight is not None:
            scale = scale * weight.tensor
        shift = -mean.tensor * scale
        if bias is not None:
            shift = shift + bias.tensor
        before: Any = node.args[0]
        last = self.operations[-1] if self.operations else {}
        alone = len(before.users) == 1 and (last.get("name"),) == x.sources
        if alone and last["kind"] in ("convolution", "product"):
            self._fold(last, scale.numpy(), shift.numpy())
            return x
        shape = [-1] + [1] * (x.positions.ndim - 2)
        scaled = self._times(layer, x, Fixed(scale.view(shape), secret=True))
        return self._plus(layer, scaled, Fixed(shift.view(shape), secret=True))

    def _fold(
        self, operation: dict[str, Any], scale: np.ndarray, shift: np.ndarray
    ) -> None:
        """The operation computes scale * result + shift, by channel."""
        _, weight, bias = operation["of"]
        by_row = scale  # of a product's weights [terms, channels]
        by_channel = (scale, shift)
        if operation["kind"] == "convolution":
            by_row = scale.reshape(-1, 1, 1, 1)
            by_channel = (scale.reshape(-1, 1, 1), shift.reshape(-1, 1, 1))
        biases = self.tensors[bias] * by_channel[0] + by_channel[1]
        self.tensors[weight] = (self.tensors[weight] * by_row).astype(np.float32)
        self.tensors[bias] = biases.astype(np.float32)

    # ------------------------------------------------------------------ elementwise

    def _of_relu(self, layer: str, x: Elements) -> Elements:
        return self._emit("relu", layer, [x], x.positions.shape)

    def _of_pow(self, layer: str, x: Elements, power: Any) -> Elements:
        if power != 2:
            raise ValueError(
                f"{layer!r} has a power of {power}; an artefact has squares"
            )
        return self._emit("square", layer, [x], x.positions.shape)

    def _of_add(self, layer: str, x: Any, y: Any) -> Elements:
        if isinstance(x, Elements) and isinstance(y, Elements):
            return self._emit("add", layer, [x, y], x.positions.shape)
        if isinstance(x, Elements):
            return self._plus(layer, x, y)
        return self._plus(layer, y, x)

    def _of_sub(self, layer: str, x: Any, y: Any) -> Elements:
        if isinstance(x, Elements) and isinstance(y, Elements):
            return self._emit("subtract", layer, [x, y], x.positions.shape)
        if isinstance(x, Elements):
            return self._plus(layer, x, _mapped(torch.neg, y))
        return self._plus(layer, self._times(layer, y, -1.0), x)

    def _of_mul(self, layer: str, x: Any, y: Any) -> Elements:
        if isinstance(x, Elements) and isinstance(y, Elements):
            if x is y:
                return self._emit("square", layer, [x], x.positions.shape)
            raise ValueError(
                f"{layer!r} multiplies two values of the image, which an artefact has only as "
                f"squares"
            )
        if isinstance(x, Elements):
            return self._times(layer, x, y)
        return self._times(layer, y, x)

    def _of_div(self, layer: str, x: Elements, y: Any) -> Elements:
        return self._times(layer, x, _mapped(torch.reciprocal, y))

    def _of_neg(self, layer: str, x: Elements) -> Elements:
        return self._times(layer, x, -1.0)

    def _times(self, layer: str, x: Elements, factor: Any) -> Elements:
        name = self._constant(_constant(factor))
        return self._emit("multiply", layer, [x, name], x.positions.shape)

    def _plus(self, layer: str, x: Elements, summand: Any) -> Elements:
        name = self._constant(_constant(summand))
        return self._emit("add", layer, [x, name], x.positions.shape)

    # ------------------------------------------------------------------ pools

    def _of_mean(
        self, layer: str, x: Elements, dims: list[int], keepdim: bool = False
    ) -> Elements:
        result = torch.zeros(x.positions.shape).mean(dims, keepdim)
        inner = [dim % x.positions.ndim for dim in dims]
        outer = [dim for dim in range(x.positions.ndim) if dim not in inner]
        positions = x.positions.permute(*outer, *inner).flatten(len(outer))
        return self._averaged(layer, x, positions, result.shape)

    def _of_avg_pool2d(
        self,
        layer: str,
        x: Elements,
        kernel: list[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Elements:
        if ceil_mode or divisor or (max(padding) and not count_include_pad):
            raise ValueError(
                f"{layer!r} has ceil_mode, a divisor or padding that does not count, which an "
                f"artefact lacks"
            )
        positions = _windows(x, kernel, stride or kernel, padding)
        return self._averaged(layer, x, positions, positions.shape[:-1])

    def _averaged(
        self, layer: str, x: Elements, positions: Tensor, shape: Any
    ) -> Elements:
        """The means over the last dimension."""
        parts = Elements(x.sources, positions, layer)
        total = self._emit("sum", layer, [parts], positions.shape[:-1])
        mean = self._times(layer, total, 1 / positions.shape[-1])
        return Elements(mean.sources, mean.positions.view(shape), layer)

    def _max_pooled(
        self,
        layer: str,
        x: Elements,
        kernel: list[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        ceil_mode: bool = False,
    ) -> Elements:
        """max(a, b) = a + relu(b - a), in a tree over each window."""
        if ceil_mode or max(dilation) > 1:
            raise ValueError(
                f"{layer!r} has ceil_mode or dilation, which an artefact lacks"
            )
        positions = _windows(x, kernel, stride or kernel, padding)
        inside = positions.amax(-1, keepdim=True)  # instead of the padding
        positions = torch.where(positions == 0, inside, positions)
        best = Elements(x.sources, positions, layer)
        while best.positions.shape[-1] > 1:
            half = best.positions.shape[-1] // 2
            first, second, odd = (
                Elements(best.sources, part, layer)
                for part in best.positions.tensor_split((half, 2 * half), -1)
            )
            shape = first.positions.shape
            difference = self._emit("subtract", layer, [second, first], shape)
            more = self._emit("relu", layer, [difference], shape)
            larger = self._emit("add", layer, [first, more], shape)
            best = self._moved(torch.cat, ([larger, odd], -1), {}, layer)
        return Elements(best.sources, best.positions[..., 0], layer)


def _program(net: nn.Module, image: Tensor) -> torch.export.ExportedProgram:
    """The net as ATen operations, for a batch of one image."""
    with torch.no_grad(), warnings.catch_warnings():
        # torch deprecates parts of itself
        warnings.simplefilter("ignore", FutureWarning)
        return torch.export.export(net, (image,)).run_decompositions()


def _windows(
    x: Elements, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The positions of each window of a pool, [1, C, H, W, elements]."""
    height, width = (list(padding) * 2)[:2]
    padded = torch.nn.functional.pad(x.positions, (width, width, height, height))
    rows = padded.unfold(2, kernel[0], stride[0])
    return rows.unfold(3, kernel[-1], stride[-1]).flatten(4)


def _folded(function: Any, arguments: Any, options: Any) -> Any:
    """What a function makes of constants."""
    leaves, tree = tree_flatten((arguments, options), is_leaf=_is_ours)
    constants = [leaf for leaf in leaves if isinstance(leaf, Fixed)]
    plain = [leaf.tensor if isinstance(leaf, Fixed) else leaf for leaf in leaves]
    arguments, options = tree_unflatten(plain, tree)
    secret = any(constant.secret for constant in constants)
    return _wrapped(
        function(*arguments, **options), lambda tensor: Fixed(tensor, secret)
    )


def _wrapped(result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """Each tensor of a result, wrapped."""
    if result is None:  # of an assertion
        return None
    if isinstance(result, Tensor):
        return wrap(result)
    return [wrap(tensor) for tensor in result]


def _constant(item: Any) -> Fixed:
    """A number is public."""
    if isinstance(item, Fixed):
        return item
    return Fixed(torch.tensor(float(item)), secret=False)


def _mapped(function: Callable[[Tensor], Tensor], item: Any) -> Fixed:
    constant = _constant(item)
    return Fixed(function(constant.tensor), constant.secret)


def _is_ours(item: Any) -> bool:
    return isinstance(item, Elements | Fixed)


def _layer_of(node: fx.Node, operator: str) -> str:
    """The name of the module that computes the node, or else its operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return path.partition("net.")[2] or operator
