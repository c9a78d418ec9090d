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
from fastbcd.ops.calls import KernelCall, contiguous
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
    y = _plain("masked_relu_plain", trials, out, (x, mask, scale, shift, residual))
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
    y = _plain("masked_poly_plain", trials, out, (x, mask, coef, scale, shift, residual))
    if y is not None:
        return y
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    channels = mask.shape[1 if trials else 0]
    check_small("coef", coef, x, (3, channels), (3,))
    if coef.ndim == 1:
        coef = coef.unsqueeze(1).expand(3, channels)
    return _call("masked_poly", x, mask, (coef, scale, shift), residual, trials, out)


def _plain(
    kernel: str, trials: bool | None, out: Tensor | None, arguments: tuple[Any, ...]
) -> Tensor | None:
    """The result of the most frequent call, without the checks below: small tensors wait for them.

    None unless it is an inference without trials on CPU tensors that a kernel reads as they are;
    C++ compares shapes, dtypes and strides.
    """
    x = arguments[0]
    if out is not None or x.dtype not in DTYPES or not unseen(arguments):
        return None
    if trials or (trials is None and x.ndim != 4):  # other shapes may be ambiguous
        return None
    return _as_they_are(kernel, arguments)


def _as_they_are(kernel: str, arguments: tuple[Any, ...]) -> Tensor | None:
    """The result of a kernel without trials that takes the arguments of the op, or None."""
    function = getattr(kernels.module_for(arguments[0]), kernel, None)
    return None if function is None else function(*arguments)


def _call(
    op: str,
    x: Tensor,
    mask: Tensor,
    small: tuple[Tensor | None, ...],
    residual: Tensor | None,
    trials: bool,
    out: Tensor | None,
) -> Tensor:
    """The operator, with its per-channel arguments in the compute dtype."""
    dtype = compute_dtype(x.dtype)
    # `to` costs 1 µs even where it returns its argument.
    small = tuple([v if v is None or v.dtype == dtype else v.to(dtype) for v in small])
    if out is None:
        return OPERATORS[op](x, mask, *small, residual, trials)
    check_out(out, x, mask, trials, (*small, residual))
    OPERATORS[f"{op}_out"](x, mask, *small, residual, trials, out)
    return out


def masked_call(x, mask, *parameters, out=None) -> KernelCall:
    """The layout of a forward; parameters: ([coef,] scale, shift, residual, trials)."""
    *small, residual, trials = parameters
    mask, x, residual = dense_together(mask, trials, x, residual)
    return KernelCall(
        outputs=[new_output(x, mask, trials) if out is None else out],
        inputs=(x, mask, *map(contiguous, small), residual),
        geometry=(x, mask, trials, *are_shared(mask, trials, x, residual)),
    )


def _define(op: str, small: str) -> None:
    """The operators `op` and `op`_out, which writes into its last argument."""
    parameters = f"Tensor x, Tensor mask, {small}, Tensor? residual, bool trials"

    def short(*arguments: Any) -> Tensor | None:
        *tensors, trials = arguments
        return None if trials else _as_they_are(f"{op}_plain", tuple(tensors))

    def write(*arguments: Any) -> None:
        *inputs, out = arguments
        call = masked_call(*inputs, out=out)
        if _writable(out, call):
            compute(f"{op}_forward", call, inputs)
        else:
            out.copy_(OPERATORS[op].run(*inputs))
        if not out.is_inference():  # a graph that saved `out` before now raises in its backward
            torch.autograd.graph.increment_version(out)

    define(f"{op}({parameters}) -> Tensor", masked_call, short)
    Operator(f"{op}_out({parameters}, Tensor(a!) out) -> ()", write, lambda *arguments: None)


def _writable(out: Tensor, call: KernelCall) -> bool:
    """Can a kernel write into `out`: dense in x's order, and no input partly in its memory?"""
    x, _, trials, x_shared, _ = call.geometry
    channel = 2 if trials else 1
    if not in_order(out, channel, item_order(x, channel - x_shared)):
        return False
    return not any(_overlap(t, out) for t in call.inputs if t is not None)


def _overlap(t: Tensor, out: Tensor) -> bool:
    """Do two dense tensors share a part of their memory, without being the same elements?"""
    start = t.data_ptr() - out.data_ptr()
    if start == 0 and t.shape == out.shape and t.dtype == out.dtype:
        return False
    return -t.nbytes < start < out.nbytes


_define("masked_relu", "Tensor? scale, Tensor? shift")
_define("masked_poly", "Tensor coef, Tensor? scale, Tensor? shift")


def _relu_backward_call(
    grad, y, mask, x, scale, trials, x_shared, residual_shared, want_residual
) -> KernelCall:
    mask, y, grad, x = dense_together(mask, trials, y, grad, x)
    dresidual = new_gradient(grad, residual_shared) if want_residual else None
    daffine = None if x is None else scale.new_empty((2, scale.numel()))
    return KernelCall(
        outputs=[new_gradient(grad, x_shared), dresidual, daffine],
        inputs=(grad, y, mask, x, contiguous(scale)),
        geometry=(y, mask, trials, x_shared, residual_shared and want_residual),
    )


def _poly_backward_call(
    grad, x, mask, coef, scale, shift, residual, trials, want_residual
) -> KernelCall:
    mask, x, residual, grad = dense_together(mask, trials, x, residual, grad)
    x_shared, residual_shared = are_shared(mask, trials, x, residual)
    dresidual = new_gradient(grad, residual_shared) if want_residual else None
    daffine = None if scale is None else coef.new_empty((2, coef.shape[1]))
    small = map(contiguous, (coef, scale, shift))
    return KernelCall(
        outputs=[new_gradient(grad, x_shared), dresidual, coef.new_empty(coef.shape), daffine],
        inputs=(grad, x, mask, *small, residual),
        geometry=(x, mask, trials, x_shared, residual_shared),
    )


def _short_relu_backward(grad, y, mask, x, scale, trials, *flags) -> tuple[Tensor, ...] | None:
    want_residual = flags[-1]
    if trials or want_residual or x is not None or scale is not None:
        return None
    dx = _as_they_are("masked_relu_backward_plain", (grad, y, mask))
    return None if dx is None else (dx, dx.new_empty(0), dx.new_empty(0))


_masked_relu_backward = define(
    "masked_relu_backward(Tensor grad, Tensor y, Tensor mask, Tensor? x, Tensor? scale, "
    "bool trials, bool x_shared, bool residual_shared, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor daffine)",
    _relu_backward_call,
    _short_relu_backward,
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
    x_shared, residual_shared = ctx.shared
    want_residual = ctx.needs_input_grad[4]
    # dresidual = dz = dx, one tensor for both, unless a scale or a sum over trials differs.
    same = scale is None and x_shared == residual_shared
    dx, dresidual, daffine = _masked_relu_backward.derivative(
        grad, y, mask, x, scale, ctx.trials, *ctx.shared, want_residual and not same
    )
    if same:
        dresidual = dx
    return dx, None, *_rows(daffine, x), dresidual if want_residual else None, None


def _poly_setup(ctx, inputs, output) -> None:
    *tensors, ctx.trials = inputs
    ctx.save_for_backward(*tensors)


def _poly_gradients(ctx, grad):
    saved = ctx.saved_tensors
    scale = saved[3]
    want_residual = ctx.needs_input_grad[5]
    dx, dresidual, dcoef, daffine = _masked_poly_backward.derivative(
        grad, *saved, ctx.trials, want_residual
    )
    dresidual = dresidual if want_residual else None
    return dx, None, dcoef, *_rows(daffine, scale), dresidual, None


def _rows(daffine: Tensor, reason: Tensor | None) -> tuple[Tensor | None, ...]:
    """dscale and dshift; None without the tensor that is a reason to compute them."""
    return (None, None) if reason is None else daffine.unbind()


OPERATORS["masked_relu"].differentiate(_relu_setup, _relu_gradients)
OPERATORS["masked_poly"].differentiate(_poly_setup, _poly_gradients)
