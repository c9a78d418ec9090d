"""A network rewritten for speed: what precedes an activation becomes part of its call.

    act(a + b)        ->  act(a, b)
    act(norm(a) + b)  ->  NormActivation, batch norm and activation in one op, on a CPU

The result shares every parameter, buffer and mask with the net, and takes tensors in channels_last
order. Call train() or eval() on it, whichever it was made for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fastbcd.graph import cpu_conv
from fastbcd.graph.operands import operands
from fastbcd.graph.trace import forget_source, pure_module, trace, without_inplace
from fastbcd.masking.activations import MaskedActivation
from fastbcd.ops.norm import norm_masked
from fastbcd.runtime.module_mode import eval_mode, train_mode
from fastbcd.runtime.warn_once import warn_once


class NormActivation(nn.Module):
    """act(norm(x) [+ residual]) with the net's own modules; as one op where that is possible."""

    def __init__(self, norm: nn.BatchNorm2d, act: MaskedActivation) -> None:
        super().__init__()
        self.norm = norm
        self.act = act

    def forward(self, x: Tensor, residual: Any = None) -> Tensor:
        """x, residual [B, C, H, W] -> [B, C, H, W]."""
        norm: Any = self.norm
        plain = self.act.saliency_pass is None and not torch.compiler.is_compiling()
        fits = _suits(x)
        if residual is not None:
            fits = fits and _suits(residual) and x.shape == residual.shape
        if not (norm.training and plain and fits):
            # Hooks are called for the pair, once.
            return self.act.forward(norm(x), residual)
        coef = self.act.coefficients()
        return norm_masked(x, self.act.mask, coef, residual, norm=norm)

    @staticmethod
    def fits(norm: Any, act: MaskedActivation) -> bool:
        """Can this pair be one op?"""
        if type(norm) is not nn.BatchNorm2d or not norm.affine:
            return False
        plain = type(act).activate is MaskedActivation.activate
        tracked = norm.running_mean is not None and norm.momentum is not None
        return plain and tracked and faster_as_one(norm.weight)


def faster_as_one(weight: Tensor) -> bool:
    """Are norm and activation faster as one op? On CPUs: see docs/benchmarks.md for GPUs."""
    return weight.is_cpu and weight.dtype == torch.float32


def _suits(x: Any) -> bool:
    """float32 [B, C, H, W] in channels_last memory, with more than one value per channel."""
    if not isinstance(x, Tensor) or x.ndim != 4 or x.dtype != torch.float32:
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and x.numel() > x.shape[1]


def fused(net: nn.Module, train: bool = True) -> tuple[nn.Module, torch.memory_format]:
    """The net with its additions fused into activations, and the memory format of its inputs.

    A net that cannot be traced, in train or in eval mode, is returned unchanged, with the
    contiguous format: it may contain a `view` that channels_last does not allow.
    """
    mode = eval_mode
    if train:
        mode = train_mode
    try:
        with mode(net):
            model = fx.GraphModule(
                net, without_inplace(net, trace(net)), type(net).__name__
            )
            return _rewritten(model), torch.channels_last
    except Exception as error:  # whatever the net's own forward raises on fx proxies
        warn_once(
            f"{type(net).__name__} runs as it is, slower than it could: torch.fx cannot trace it "
            f"({error})"
        )
        return net, torch.contiguous_format


def _rewritten(model: fx.GraphModule) -> fx.GraphModule:
    forget_source(model)
    for node in model.graph.find_nodes(op="call_module"):
        module: Any = model.get_submodule(node.target)
        # The graph relies on no writing; a fused call may read the input later.
        better = cpu_conv.for_training(pure_module(module))
        if better is not module:
            model.set_submodule(node.target, better)
        elif isinstance(module, MaskedActivation) and len(node.args) == 1:
            _fuse_into(model, node, module)
    model.graph.lint()
    model.recompile()
    forget_source(model)
    return model


def _fuse_into(model: fx.GraphModule, node: fx.Node, act: MaskedActivation) -> None:
    """Make an addition and a batch norm before an activation, read by nothing else, part of it."""

    def is_norm(term: fx.Node) -> bool:
        if term.op != "call_module" or len(term.args) != 1:
            return False
        return NormActivation.fits(model.get_submodule(str(term.target)), act)

    reads = operands(node, is_norm)
    if reads.norm is not None:
        norm: Any = model.get_submodule(str(reads.norm.target))
        node.target = f"fused_{node.name}"
        model.add_submodule(node.target, NormActivation(norm, act))
    node.args = reads.terms
    for gone in reads.absorbed:
        model.graph.erase_node(gone)
