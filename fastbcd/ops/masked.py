"""masked_relu and masked_poly: y = act(x*scale + shift + residual) with one bit per neuron."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.kernels.geometry import (
    are_shared,
    compute_dtype,
    dense_together,
    in_order,
    item_order,
    new_gradient,
    new_output,
)
from fastbcd.ops.arguments import DTYPES, check_arguments, check_out, check_small
from fastbcd.ops.calls import Call, contiguous
from fastbcd.ops.registry import OPERATORS, Operator, compute, define, unseen


def masked_relu(
    x: Tensor,
    mask: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    trials: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """relu(z) where the mask's bit is 1, else z, with z = x*scale + shift + residual.

    Args:
        x: [B, C, ...]. With trials: [T, B, C, ...], or [B, C, ...] used by all trials.
        mask: [C, ...] bool or uint8, 1 = this ReLU is kept. With trials: [T, C, ...].
        scale, shift: [C], both or neither: a batch norm in eval mode.
        residual: added before the activation; shaped like x, with or without T.
        trials: whether the mask's first dimension counts trials. None: decided by the
            shapes; where both readings fit (T = B), a 4-D x is [B, C, H, W] and any other
            x is refused.
        out: written instead of a new tensor, for inference; it may be x itself.

    Equivalent to: torch.where(mask, torch.relu(z), z)

    >>> x = torch.tensor([[-1.0, -2.0, 3.0]])
    >>> masked_relu(x, torch.tensor([True, False, True]))
    tensor([[ 0., -2.,  3.]])
    """
    y = _plain("masked_relu_plain", trials, out, x, mask, scale, shift, residual)
    if y is not None:
        return y
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    return _call("masked_relu", x, mask, (scale, shift), residual, trials, out)


def masked_poly(
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    trials: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """relu(z) where the mask's bit is 1, else c2*z² + c1*z + c0, z = x*scale + shift + residual.

    coef is [3, C] (one polynomial per channel) or [3] (one for the layer), in the order c0, c1,
    c2. Everything else is as in `masked_relu`.

    Equivalent to: torch.where(mask, torch.relu(z), (c2*z + c1)*z + c0)

    >>> square = torch.tensor([0.0, 0.0, 1.0])
    >>> masked_poly(torch.tensor([[-3.0, -3.0]]), torch.tensor([True, False]), square)
    tensor([[0., 9.]])
    """
    y = _plain("masked_poly_plain", trials, out, x, mask, coef, scale, shift, residual)
    if y is not None:
        return y
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    channels = mask.shape[1 if trials else 0]
    check_small("coef", coef, x, (3, channels), (3,))
    if coef.ndim == 1:
        coef = coef.unsqueeze(1).expand(3, channels)
    return _call("masked_poly", x, mask, (coef, scale, shift), residual, trials, out)


def _plain(kernel: str, trials: bool | None, out: Any, *arguments: Any) -> Tensor | None:
    """The result of the most frequent call, without the checks below: small tensors wait for them.

    None unless it is an inference without trials on CPU tensors that a kernel reads as they are;
    C++ compares shapes, dtypes and strides.
    """
    x = arguments[0]
    if out is not None or not unseen(arguments) or x.dtype not in DTYPES:
        return None
    if trials is not False and (trials is not None or x.ndim != 4):  # other shapes may be ambiguous
        return None
    return _as_they_are(kernel, arguments)


def _as_they_are(kernel: str, arguments: tuple[Any, ...]) -> Tensor | None:
    """The result of a kernel without trials that takes the arguments of the op, or None."""
    function = getattr(kernels.module_for(arguments[0]), kernel, None)
    return None if function is None else function(*arguments)


def _call(
    op: str, x: Tensor, mask: Tensor, small: tuple, residual: Tensor | None, trials: bool, out: Any
) -> Tensor:
    """The operator, with its per-channel arguments in the compute dtype."""
    dtype = compute_dtype(x.dtype)
    # `to` costs 1 µs even where it returns its argument.
    small = tuple([v if v is None or v.dtype == dtype else v.to(dtype) for v in small])
    if out is not None:
        check_out(out, x, mask, trials, (x, *small, residual, out))
        OPERATORS[f"{op}_out"](x, mask, *small, residual, trials, out)
        return out
    return OPERATORS[op](x, mask, *small, residual, trials)


def masked_call(x, mask, *parameters, out=None) -> Call:
    """parameters: ([coef,] scale, shift, residual, trials)."""
    *small, residual, trials = parameters
    mask, x, residual = dense_together(mask, trials, x, residual)
    y = new_output(x, mask, trials) if out is None else out
    inputs = (x, mask, *(contiguous(t) for t in small), residual)
    return Call([y], inputs, (x, mask, trials, *are_shared(mask, trials, x, residual)), (trials,))


def _define(op: str, small: str) -> None:
    """The operators `op` and `op`_out, which writes into its last argument."""
    parameters = f"Tensor x, Tensor mask, {small}, Tensor? residual, bool trials"

    def short(*arguments: Any) -> list[Any] | None:
        *given, trials = arguments
        y = None if trials else _as_they_are(f"{op}_plain", tuple(given))
        return None if y is None else [y]

    define(f"{op}({parameters}) -> Tensor", masked_call, short=short)

    def write(*arguments: Any) -> None:
        *given, out = arguments
        call = masked_call(*given, out=out)
        writable = _writable(out, call)
        if not writable:
            _refuse_internal_overlap(out)
            call.outputs[0] = new_output(call.inputs[0], call.inputs[1], call.extra[0])
        compute(f"{op}_forward", call)
        if not writable:
            out.copy_(call.outputs[0])
        if not out.is_inference():  # a graph that saved `out` before now raises in its backward
            torch.autograd.graph.increment_version(out)

    schema = f"{op}_out({parameters}, Tensor(a!) out) -> ()"
    Operator(schema, write, lambda *a: None)


def _writable(out: Tensor, call: Call) -> bool:
    """Can a kernel write into `out`: dense in x's order, and no input partly in its memory?"""
    x, _, trials, x_shared, _ = call.geometry
    channel = 2 if trials else 1
    first, last = out.data_ptr(), out.data_ptr() + out.numel() * out.element_size()
    return in_order(out, channel, item_order(x, channel - x_shared)) and not any(
        t.data_ptr() < last
        and t.data_ptr() + t.numel() * t.element_size() > first
        and not (t.data_ptr() == first and t.shape == out.shape and t.dtype == out.dtype)
        for t in call.inputs
        if t is not None
    )


def _refuse_internal_overlap(out: Tensor) -> None:
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"out {tuple(out.shape)} with strides {out.stride()} has elements that share "
                f"memory (an expanded tensor?); pass out=torch.empty_like(x)"
            )
        reach += (size - 1) * stride


_define("masked_relu", "Tensor? scale, Tensor? shift")
_define("masked_poly", "Tensor coef, Tensor? scale, Tensor? shift")


def _relu_backward_call(
    grad, y, mask, x, scale, trials, x_shared, residual_shared, want_residual
) -> Call:  # fmt: skip
    mask, y, grad, x = dense_together(mask, trials, y, grad, x)
    dresidual = new_gradient(grad, residual_shared) if want_residual else None
    daffine = None if x is None else scale.new_empty((2, scale.numel()))
    outputs = [new_gradient(grad, x_shared), dresidual, daffine]
    shared = (trials, x_shared, residual_shared and want_residual)
    inputs = (grad, y, mask, x, contiguous(scale))
    return Call(outputs, inputs, (y, mask, *shared), (trials, x_shared, residual_shared))


def _poly_backward_call(
    grad, x, mask, coef, scale, shift, residual, trials, want_residual
) -> Call:  # fmt: skip
    mask, x, residual, grad = dense_together(mask, trials, x, residual, grad)
    shared = are_shared(mask, trials, x, residual)
    dresidual = new_gradient(grad, shared[1]) if want_residual else None
    daffine = None if scale is None else coef.new_empty((2, coef.shape[1]))
    outputs = [new_gradient(grad, shared[0]), dresidual, coef.new_empty(coef.shape), daffine]
    inputs = (grad, x, mask, contiguous(coef), contiguous(scale), contiguous(shift), residual)
    return Call(outputs, inputs, (x, mask, trials, *shared), (trials,))


def _short_relu_backward(grad, y, mask, x, scale, trials, *flags) -> list[Any] | None:
    if x is None and scale is None and not (trials or flags[-1]):
        dx = _as_they_are("masked_relu_backward_plain", (grad, y, mask))
        if dx is not None:
            return [dx, None, None]
    return None


_masked_relu_backward = define(
    "masked_relu_backward(Tensor grad, Tensor y, Tensor mask, Tensor? x, Tensor? scale, "
    "bool trials, bool x_shared, bool residual_shared, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor daffine)",
    _relu_backward_call,
    short=_short_relu_backward,
)
_masked_poly_backward = define(
    "masked_poly_backward(Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
    "Tensor? shift, Tensor? residual, bool trials, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor dcoef, Tensor daffine)",
    _poly_backward_call,
)


def _relu_setup(ctx, inputs, output) -> None:
    x, mask, scale, _, residual, ctx.trials = inputs
    affine = any(ctx.needs_input_grad[2:4])
    # Only the affine gradients need x; the activation's own need y alone.
    ctx.save_for_backward(output, mask, x if affine else None, scale)
    ctx.shared = are_shared(mask, ctx.trials, x, residual)


def _relu_gradients(ctx, grad):
    y, mask, x, scale = ctx.saved_tensors
    needs_residual = ctx.needs_input_grad[4]
    # dresidual = dz = dx, one tensor for both, unless a scale or a sum over trials differs.
    same = scale is None and ctx.shared[0] == ctx.shared[1]
    dx, dresidual, daffine = _masked_relu_backward.derivative(
        grad, y, mask, x, scale, ctx.trials, *ctx.shared, flags=(needs_residual and not same,)
    )
    dscale, dshift = (None, None) if x is None else daffine.unbind()
    dresidual = (dx if same else dresidual) if needs_residual else None
    return dx, None, dscale, dshift, dresidual, None


def _poly_setup(ctx, inputs, output) -> None:
    *tensors, ctx.trials = inputs
    ctx.save_for_backward(*tensors)


def _poly_gradients(ctx, grad):
    saved = ctx.saved_tensors
    needs_residual = ctx.needs_input_grad[5]
    dx, dresidual, dcoef, daffine = _masked_poly_backward.derivative(
        grad, *saved, ctx.trials, flags=(needs_residual,)
    )
    dscale, dshift = (None, None) if saved[3] is None else daffine.unbind()
    return dx, None, dcoef, dscale, dshift, dresidual if needs_residual else None, None


OPERATORS["masked_relu"].differentiate(_relu_setup, _relu_gradients)
OPERATORS["masked_poly"].differentiate(_poly_setup, _poly_gradients)
