"""masked_relu and masked_poly: y = act(x*scale + shift + residual) with one bit per neuron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastbcd.kernels.geometry import (
    compute_dtype,
    dense,
    is_shared,
    item_order,
    new_output,
    orders_coincide,
)
from fastbcd.ops import reference
from fastbcd.ops.arguments import check_arguments, check_channelwise, check_out
from fastbcd.ops.registry import (
    LIBRARY,
    Call,
    compute,
    contiguous,
    define,
    differentiate,
    differentiated,
    transformed,
)


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
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    scale, shift = _as_compute(scale, x), _as_compute(shift, x)
    if out is not None:
        check_out(out, x, mask, trials, (x, scale, shift, residual, out))
        torch.ops.fastbcd.masked_relu_out.default(x, mask, scale, shift, residual, trials, out)
        return out
    function = reference.masked_relu if transformed() else _masked_relu
    return function(x, mask, scale, shift, residual, trials)


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
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    channels = mask.shape[1 if trials else 0]
    check_channelwise("coef", coef, x, (3, channels), (3,))
    if coef.ndim == 1:
        coef = coef.unsqueeze(1).expand(3, channels)
    coef, scale, shift = _as_compute(coef, x), _as_compute(scale, x), _as_compute(shift, x)
    if out is not None:
        check_out(out, x, mask, trials, (x, coef, scale, shift, residual, out))
        arguments = (x, mask, coef, scale, shift, residual, trials, out)
        torch.ops.fastbcd.masked_poly_out.default(*arguments)
        return out
    function = reference.masked_poly if transformed() else _masked_poly
    return function(x, mask, coef, scale, shift, residual, trials)


def _as_compute(v: Tensor | None, x: Tensor) -> Any:
    return None if v is None else v.to(compute_dtype(x.dtype))


# --------------------------------------------------------------------------------- forward


def _channel(t: Tensor, mask: Tensor, trials: bool) -> int:
    """The channel dimension of t [B, C, ...] or [T, B, C, ...]."""
    return 2 if trials and not is_shared(t, mask, trials) else 1


def _dense_inputs(x: Tensor, mask: Tensor, residual: Any, trials: bool) -> tuple:
    """x, mask, residual as dense memory, the residual in x's order; whether they are shared."""
    channel = _channel(x, mask, trials)
    x = dense(x, channel)
    mask = dense(mask, 1 if trials else 0)
    shared = [is_shared(x, mask, trials), False]
    if residual is not None:
        shared[1] = is_shared(residual, mask, trials)
        residual = dense(residual, _channel(residual, mask, trials), item_order(x, channel))
    return x, mask, residual, shared


def _forward(x, mask, *parameters, out=None) -> Call:
    """parameters: ([coef,] scale, shift, residual, trials)."""
    *small, residual, trials = parameters
    x, mask, residual, shared = _dense_inputs(x, mask, residual, trials)
    y = new_output(x, mask, trials) if out is None else out
    inputs = (x, mask, *(contiguous(t) for t in small), residual)
    return Call([y], inputs, (x, mask, trials, *shared), (trials,))


_PARAMETERS = "Tensor? scale, Tensor? shift, Tensor? residual, bool trials"
_masked_relu = define(
    f"masked_relu(Tensor x, Tensor mask, {_PARAMETERS}) -> Tensor",
    _forward, reference.masked_relu, "masked_relu_forward",
)  # fmt: skip
_masked_poly = define(
    f"masked_poly(Tensor x, Tensor mask, Tensor coef, {_PARAMETERS}) -> Tensor",
    _forward, reference.masked_poly, "masked_poly_forward",
)  # fmt: skip


def _define_out(name: str, parameters: str, formula: Callable[..., Tensor]) -> None:
    kernel = f"{name}_forward"

    def implementation(*arguments: Any) -> None:
        *given, out = arguments
        call = _forward(*given, out=out)
        if _writable(out, call):
            compute(kernel, formula, call)
        else:
            _refuse_internal_overlap(out)
            call.outputs[0] = new_output(call.inputs[0], call.inputs[1], call.extra[0])
            compute(kernel, formula, call)
            out.copy_(call.outputs[0])
        if not out.is_inference():  # a graph that saved `out` before now raises in its backward
            torch.autograd.graph.increment_version(out)

    LIBRARY.define(f"{name}_out({parameters}, {_PARAMETERS}, Tensor(a!) out) -> ()")
    LIBRARY.impl(f"{name}_out", implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastbcd::{name}_out", lambda *a: None, lib=LIBRARY)


def _writable(out: Tensor, call: Call) -> bool:
    """Can a kernel write into `out`: dense in x's order, and no input partly in its memory?"""
    x, mask, trials = call.geometry[:3]
    channel = 2 if trials else 1
    order = item_order(out, channel)
    if order is None or not (
        order == item_order(x, _channel(x, mask, trials)) or orders_coincide(out, channel)
    ):
        return False
    first, last = out.data_ptr(), out.data_ptr() + out.numel() * out.element_size()
    for t in call.inputs:  # all dense
        if t is None or (t.data_ptr() == first and t.shape == out.shape and t.dtype == out.dtype):
            continue
        if t.data_ptr() < last and t.data_ptr() + t.numel() * t.element_size() > first:
            return False
    return True


def _refuse_internal_overlap(out: Tensor) -> None:
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"out {tuple(out.shape)} with strides {out.stride()} has elements that share "
                f"memory (an expanded tensor?); pass out=torch.empty_like(x)"
            )
        reach += (size - 1) * stride


_define_out("masked_relu", "Tensor x, Tensor mask", reference.masked_relu)
_define_out("masked_poly", "Tensor x, Tensor mask, Tensor coef", reference.masked_poly)

# -------------------------------------------------------------------------------- backward


def _new_gradients(grad, x_shared, residual_shared, want_residual) -> list[Any]:
    """Empty dx and dresidual in the memory order of the dense grad [.., B, *S]."""

    def like(shared: bool) -> Tensor:
        if not shared:
            return torch.empty_like(grad)
        return grad.new_empty_strided(grad.shape[1:], grad.stride()[1:])

    return [like(x_shared), like(residual_shared) if want_residual else None]


def _relu_backward_call(
    grad, y, mask, x, scale, trials, x_shared, residual_shared, want_residual
) -> Call:  # fmt: skip
    channel = 2 if trials else 1
    y = dense(y, channel)
    order = item_order(y, channel)
    grad = dense(grad, channel, order)
    mask = dense(mask, 1 if trials else 0)
    if x is not None:
        x = dense(x, _channel(x, mask, trials), order)
    outputs = _new_gradients(grad, x_shared, residual_shared, want_residual)
    outputs.append(None if x is None else scale.new_empty((2, scale.numel())))
    shared = (trials, x_shared, residual_shared and want_residual)
    inputs = (grad, y, mask, x, contiguous(scale))
    return Call(outputs, inputs, (y, mask, *shared), (trials, x_shared, residual_shared))


def _poly_backward_call(
    grad, x, mask, coef, scale, shift, residual, trials, want_residual
) -> Call:  # fmt: skip
    x, mask, residual, shared = _dense_inputs(x, mask, residual, trials)
    grad = dense(grad, 2 if trials else 1, item_order(x, _channel(x, mask, trials)))
    outputs = _new_gradients(grad, shared[0], shared[1], want_residual)
    outputs.append(coef.new_empty(coef.shape))
    outputs.append(None if scale is None else coef.new_empty((2, coef.shape[1])))
    inputs = (grad, x, mask, contiguous(coef), contiguous(scale), contiguous(shift), residual)
    return Call(outputs, inputs, (x, mask, trials, *shared), (trials,))


_masked_relu_backward = define(
    "masked_relu_backward(Tensor grad, Tensor y, Tensor mask, Tensor? x, Tensor? scale, "
    "bool trials, bool x_shared, bool residual_shared, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor daffine)",
    _relu_backward_call, reference.masked_relu_backward,
)  # fmt: skip
_masked_poly_backward = define(
    f"masked_poly_backward(Tensor grad, Tensor x, Tensor mask, Tensor coef, {_PARAMETERS}, "
    "bool want_residual) -> (Tensor dx, Tensor dresidual, Tensor dcoef, Tensor daffine)",
    _poly_backward_call, reference.masked_poly_backward,
)  # fmt: skip


def _relu_setup(ctx, inputs, output) -> None:
    x, mask, scale, _, residual, ctx.trials = inputs
    affine = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    # Only the affine gradients need x; the activation's own need y alone.
    ctx.save_for_backward(output, mask, x if affine else None, scale)
    ctx.x_shared = is_shared(x, mask, ctx.trials)
    ctx.residual_shared = residual is not None and is_shared(residual, mask, ctx.trials)


def _relu_gradients(ctx, grad):
    y, mask, x, scale = ctx.saved_tensors
    arguments = (grad, y, mask, x, scale, ctx.trials, ctx.x_shared, ctx.residual_shared)
    needs_residual = ctx.needs_input_grad[4]
    daffine: Any
    if differentiated():
        dx, dresidual, daffine = reference.masked_relu_backward(*arguments)
    else:
        # dresidual = dz = dx, one tensor for both, unless a scale or a sum over trials differs.
        same = scale is None and ctx.x_shared == ctx.residual_shared
        dx, dresidual, daffine = _masked_relu_backward(*arguments, needs_residual and not same)
        if same:
            dresidual = dx
    dscale, dshift = (None, None) if x is None else daffine
    return dx, None, dscale, dshift, dresidual if needs_residual else None, None


def _poly_setup(ctx, inputs, output) -> None:
    *tensors, ctx.trials = inputs
    ctx.save_for_backward(*tensors)


def _poly_gradients(ctx, grad):
    arguments = (grad, *ctx.saved_tensors, ctx.trials)
    needs_residual = ctx.needs_input_grad[5]
    daffine: Any
    if differentiated():
        dx, dresidual, dcoef, daffine = reference.masked_poly_backward(*arguments)
    else:
        dx, dresidual, dcoef, daffine = _masked_poly_backward(*arguments, needs_residual)
    dscale, dshift = (None, None) if ctx.saved_tensors[3] is None else daffine
    return dx, None, dcoef, dscale, dshift, dresidual if needs_residual else None, None


differentiate("masked_relu", _relu_setup, _relu_gradients)
differentiate("masked_poly", _poly_setup, _poly_gradients)
