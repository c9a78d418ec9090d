"""Nonlinear operations that `convert` leaves as they are, including ReLUs that it did not find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fastbcd.masking.activations import MaskedActivation


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The operators that a ReLU ends in: always, or if their lower bound is 0.
_ATEN_RELU = {"relu", "relu6"}
_ATEN_BOUNDED = {"clamp", "clamp_min", "threshold", "hardtanh"}

# Operators that are linear in the tensors that depend on the input.
_LINEAR = _names(
    "add sub rsub neg sum mean cumsum nansum trace diff real imag native_dropout alpha_dropout "
    "view _unsafe_view reshape _reshape_alias permute transpose t numpy_T expand expand_as "
    "slice select narrow diagonal cat stack split split_with_sizes unsafe_split chunk unbind "
    "squeeze unsqueeze flatten unflatten clone contiguous _to_copy to detach alias copy lift "
    "lift_fresh as_strided view_as_real pixel_shuffle pixel_unshuffle channel_shuffle "
    "native_channel_shuffle roll flip rot90 repeat index index_select gather take index_put "
    "scatter scatter_add slice_scatter select_scatter constant_pad_nd pad zero fill "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d unfold im2col col2im tril triu avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d mkldnn_adaptive_avg_pool2d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d "
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _native_batch_norm_legit_no_training "
    "where masked_fill masked_select dequantize quantize_per_tensor quantize_per_channel"
)
# Operators that are linear if at most one of their tensors depends on the input.
_BILINEAR = _names(
    "mul div mm addmm bmm baddbmm addbmm matmul linear mv addmv dot addcmul lerp einsum "
    "convolution _convolution conv1d conv2d conv3d conv_transpose2d mkldnn_convolution "
    "cudnn_convolution grid_sampler_2d grid_sampler_3d bilinear _trilinear"
)
_BATCH_NORM = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm"}
# Operators whose result does not depend on the values of their input.
_CONSTANT = _names(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
    "new_ones new_empty new_full new_empty_strided"
)


@dataclass(frozen=True)
class NonlinearOp:
    """An operation that `convert` left as it is."""

    name: str  # the module, or the function with the module that calls it
    kind: str  # the operator
    elements: int  # of its result, per image

    def __str__(self) -> str:
        kind = "" if self.name.rpartition(".")[2] == self.kind else f" ({self.kind})"
        return f"{self.name}{kind}: {self.elements:,} elements per image"


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` masked and what it left, as `net.conversion_report`."""

    sites: int
    relus: int  # per image
    nonlinear: tuple[NonlinearOp, ...]  # operations that stay, those of skip= included

    def __str__(self) -> str:
        stays = f"{len(self.nonlinear)} other nonlinear operations stay as they are"
        lines = [f"{self.relus:,} ReLUs at {self.sites} sites have masks; {stays}"]
        return "\n".join([*lines, *(f"  {op}" for op in self.nonlinear)])


class _Watch(TorchDispatchMode):
    """Records the nonlinear operators on tensors that depend on x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.place, self.masked, self.batch = "", False, len(x)
        self.relus: list[tuple[str, str]] = []
        self.nonlinear: dict[tuple[str, str], int] = {}
        # Tensors that depend on x; True: by a comparison, which is recorded already.
        self.depends = WeakTensorKeyDictionary()
        self.depends[x] = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, name = func._schema.name.split("::")
        name = name if name.startswith("__") else name.rstrip("_")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        marks = [self.depends[t] for t in tensors if t in self.depends]
        result = func(*args, **kwargs)
        if not marks or (space == "aten" and name in _CONSTANT):
            return result
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        values = marks.count(False)
        # A float that becomes a bool or an integer was compared or rounded.
        step = bool(values and results) and not results[0].is_floating_point()
        if not self.masked and results:
            self.record_relu(name, args, kwargs)
            if step or not self.is_linear(space, name, args, values=values, result=results[0]):
                kind = name.lstrip("_").removesuffix("_with_indices").removesuffix("_kernel")
                key = self.place, kind if space == "aten" else f"{space}::{name}"
                per_image = -(-results[0].numel() // self.batch)
                self.nonlinear[key] = self.nonlinear.get(key, 0) + per_image
        for t in results:
            self.depends[t] = not (values and t.is_floating_point())
            if t._base is not None and t is args[0]:  # written through a view
                self.depends[t._base] = False
        return result

    def is_linear(self, space: str, name: str, args: Any, *, values: int, result: Tensor) -> bool:
        if space != "aten":
            return False
        if values == 0:
            return result.dtype is torch.bool or name in _LINEAR | _BILINEAR
        if name in _BATCH_NORM:
            return args[5] is False
        divisor = name == "div" and isinstance(args[1], Tensor) and args[1] in self.depends
        return name in _LINEAR or (name in _BILINEAR and values < 2 and not divisor)

    def record_relu(self, name: str, args: Any, kwargs: Any) -> None:
        low, high = (*args[1:3], None, None)[:2]
        low = kwargs.get("min", low)
        # clamp(0, 1) is no ReLU, but hardtanh(0, 6) is a ReLU6.
        one_sided = name != "clamp" or kwargs.get("max", high) is None
        bounded = name in _ATEN_BOUNDED and isinstance(low, (int, float)) and low == 0
        if name in _ATEN_RELU or (bounded and one_sided):
            self.relus.append((self.place, name))


class Watched(NamedTuple):
    """What a net computes on an input."""

    output: Any
    shapes: dict[fx.Node, tuple[int, ...]]  # of every float tensor in its graph that depends on x
    relus: list[tuple[str, str]]  # place and operator of every ReLU besides the masked ones
    nonlinear: tuple[NonlinearOp, ...]  # all nonlinear operations, those ReLUs included


def run_watched(net: fx.GraphModule, x: Tensor, name_of: Callable[[fx.Node], str]) -> Watched:
    """Run the net node by node on a copy of x, with the same random numbers every time."""
    x, shapes = x.clone(), {}
    watch = _Watch(x)

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            watch.place = name_of(n)
            module = net.get_submodule(str(n.target)) if n.op == "call_module" else None
            watch.masked = isinstance(module, MaskedActivation)
            result = super().run_node(n)
            depends = isinstance(result, Tensor) and result in watch.depends
            if depends and result.is_floating_point():
                shapes[n] = tuple(result.shape)
            return result

    # The fused path of transformer layers computes their ReLU inside one kernel.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        devices = [x.device] if x.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices), watch:
            torch.manual_seed(0)
            output = Run(net).run(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    found = tuple(NonlinearOp(*key, elements) for key, elements in watch.nonlinear.items())
    return Watched(output, shapes, watch.relus, found)


def same_outputs(a: Any, b: Any) -> bool:
    """Equal outputs: tensors bit for bit, NaN equal to NaN, inside any nesting."""
    mine, theirs = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(theirs) and all(
        torch.equal(p.nan_to_num(), q.nan_to_num()) if isinstance(p, Tensor) else p == q
        for p, q in zip(mine, theirs, strict=True)
    )
