"""The fused activations: schemas, autograd, and the choice of a kernel.

    y = act(x * scale + shift + residual),  act = masked ReLU or masked polynomial

`masked_relu` and `masked_poly` check their arguments and call the operators
`fastbcd::masked_relu` and `fastbcd::masked_poly`, which autograd, torch.compile and
torch.export see as one node each. An operator lays its tensors out as dense memory
(`layout.py`) and hands them to a kernel: C++ for CPU tensors, Triton for CUDA tensors,
`reference.py` where neither can serve. All of them give the same bits. `soft_relu` and
`indicator_poly`, which train masks, stand in `soft.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.kernels.geometry import (
    compute_dtype,
    dense,
    geometry,
    is_shared,
    item_order,
    new_output,
    orders_coincide,
)
from fastbcd.ops import reference
from fastbcd.ops.arguments import check_arguments, check_channelwise, check_out
from fastbcd.ops.soft import indicator_poly, soft_relu

__all__ = ["indicator_poly", "masked_poly", "masked_relu", "soft_relu"]


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
        x: [B, C, ...]. With trials: [T, B, C, ...], or [B, C, ...] read once for all trials.
        mask: [C, ...] bool or uint8, 1 = this ReLU is kept. With trials: [T, C, ...].
        scale, shift: [C], together or not at all: a batch norm in eval mode.
        residual: added before the activation; shaped like x, with or without T.
        trials: whether the mask's first dimension counts trials. None reads it off the
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
    if out is None:
        return torch.ops.fastbcd.masked_relu.default(x, mask, scale, shift, residual, trials)
    check_out(out, x, mask, trials, (x, scale, shift, residual))
    torch.ops.fastbcd.masked_relu_out.default(x, mask, scale, shift, residual, trials, out)
    return out


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

    coef is [3, C] (a polynomial a channel) or [3] (one for the layer), in the order c0, c1, c2.
    Everything else is as in `masked_relu`.

    Equivalent to: torch.where(mask, torch.relu(z), (c2*z + c1)*z + c0)

    >>> square = torch.tensor([0.0, 0.0, 1.0])
    >>> masked_poly(torch.tensor([[-3.0, -3.0]]), torch.tensor([True, False]), square)
    tensor([[0., 9.]])
    """
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    channels = mask.shape[1 if trials else 0]
    check_channelwise("coef", coef, x, (3, channels), (3,))
    coef = _as_compute(coef.reshape(3, -1).expand(3, channels), x)
    scale, shift = _as_compute(scale, x), _as_compute(shift, x)
    if out is None:
        return torch.ops.fastbcd.masked_poly.default(x, mask, coef, scale, shift, residual, trials)
    check_out(out, x, mask, trials, (x, coef, scale, shift, residual))
    torch.ops.fastbcd.masked_poly_out.default(x, mask, coef, scale, shift, residual, trials, out)
    return out


def _as_compute(v: Tensor | None, x: Tensor) -> Any:
    return None if v is None else v.to(compute_dtype(x.dtype))


# ------------------------------------------------------------------------------- operators
# A pair of schemas for each activation, and an out= form for inference on reused buffers.
# `trials` says whether mask [T, *S] has a trial dimension; a gradient that was not asked for
# comes back with no elements.

_library = torch.library.Library("fastbcd", "DEF")
_library.define(
    "masked_relu(Tensor x, Tensor mask, Tensor? scale, Tensor? shift, Tensor? residual, "
    "bool trials) -> Tensor"
)
_library.define(
    "masked_relu_out(Tensor x, Tensor mask, Tensor? scale, Tensor? shift, Tensor? residual, "
    "bool trials, Tensor(a!) out) -> ()"
)
_library.define(
    "masked_relu_backward(Tensor grad, Tensor y, Tensor mask, Tensor? x, Tensor? scale, "
    "bool trials, bool x_shared, bool residual_shared, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor daffine)"
)
_library.define(
    "masked_poly(Tensor x, Tensor mask, Tensor coef, Tensor? scale, Tensor? shift, "
    "Tensor? residual, bool trials) -> Tensor"
)
_library.define(
    "masked_poly_out(Tensor x, Tensor mask, Tensor coef, Tensor? scale, Tensor? shift, "
    "Tensor? residual, bool trials, Tensor(a!) out) -> ()"
)
_library.define(
    "masked_poly_backward(Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
    "Tensor? shift, Tensor? residual, bool trials, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor dcoef, Tensor daffine)"
)


def _dense_inputs(x: Tensor, mask: Tensor, residual: Any, trials: bool) -> tuple:
    """x, mask, residual as dense memory, the residual in x's order."""
    x = dense(x, _channel(x, mask, trials))
    mask = dense(mask, 1 if trials else 0)
    if residual is not None:
        last = item_order(x, _channel(x, mask, trials))
        residual = dense(residual, _channel(residual, mask, trials), last)
    return x, mask, residual


def _channel(t: Tensor, mask: Tensor, trials: bool) -> int:
    """The channel dimension of t [B, C, ...] or [T, B, C, ...]."""
    return 2 if trials and not is_shared(t, mask, trials) else 1


def _relu_into(x, mask, scale, shift, residual, trials, y) -> None:
    kernel = kernels.choose(x)
    if kernel is None:
        y.copy_(reference.masked_relu(x, mask, scale, shift, residual, trials))
    elif y.numel():
        kernel.relu_forward(y, x, mask, scale, shift, residual, geometry(x, mask, residual, trials))


def _poly_into(x, mask, coef, scale, shift, residual, trials, y) -> None:
    kernel = kernels.choose(x)
    if kernel is None:
        y.copy_(reference.masked_poly(x, mask, coef, scale, shift, residual, trials))
    elif y.numel():
        g = geometry(x, mask, residual, trials)
        kernel.poly_forward(y, x, mask, coef.contiguous(), scale, shift, residual, g)


def _forward(into, x, mask, *parameters) -> Tensor:
    """The functional form: parameters are ([coef,] scale, shift, residual, trials)."""
    *small, residual, trials = parameters
    x, mask, residual = _dense_inputs(x, mask, residual, trials)
    y = new_output(x, mask, trials)
    into(x, mask, *small, residual, trials, y)
    return y


def _forward_out(into, x, mask, *parameters) -> None:
    """The out= form: straight into `out` where its memory order allows."""
    *small, residual, trials, out = parameters
    x, mask, residual = _dense_inputs(x, mask, residual, trials)
    channel, order = 2 if trials else 1, item_order(x, _channel(x, mask, trials))
    if item_order(out, channel) == order or (
        item_order(out, channel) is not None and orders_coincide(out, channel)
    ):
        into(x, mask, *small, residual, trials, out)
    else:
        out.copy_(_forward(into, x, mask, *small, residual, trials))


def _forward_shape(x, mask, *parameters) -> Tensor:
    x, mask, _ = _dense_inputs(x, mask, None, parameters[-1])
    return new_output(x, mask, parameters[-1])


# Each backward comes in two halves: lay out inputs and empty outputs, which is all that shape
# inference needs, then fill the outputs.


def _new_gradients(grad, trials, x_shared, residual_shared, want_residual) -> list:
    """Empty dx and dresidual in the memory order of the dense grad [.., B, *S]."""
    one = grad[0] if trials else grad
    dx = torch.empty_like(one if x_shared else grad)
    return [dx, torch.empty_like(one if residual_shared else grad) if want_residual else None]


def _lay_out_relu(
    grad, y, mask, x, scale, trials, x_shared, residual_shared, want_residual
) -> tuple[list, Any]:
    channel = 2 if trials else 1
    y = dense(y, channel)
    grad = dense(grad, channel, item_order(y, channel))
    mask = dense(mask, 1 if trials else 0)
    if x is not None:
        x = dense(x, _channel(x, mask, trials), item_order(y, channel))
    outputs = _new_gradients(grad, trials, x_shared, residual_shared, want_residual)
    outputs.append(None if x is None else scale.new_zeros((2, scale.numel())))
    return outputs, (grad, y, mask, x, scale)


def _relu_backward(*arguments) -> tuple[Tensor, ...]:
    trials, x_shared, residual_shared = arguments[5:8]
    outputs, inputs = _lay_out_relu(*arguments)
    grad, y, mask, _, _ = inputs
    kernel = kernels.choose(grad)
    if kernel is None:
        found = reference.masked_relu_backward(*inputs, *arguments[5:8])
        _copy(outputs, found)
    elif grad.numel():
        g = geometry(y, mask, None, trials)
        g = g._replace(x_shared=x_shared, residual_shared=residual_shared)
        kernel.relu_backward(*outputs, *inputs, g)
    return _none_to_empty(outputs)


def _lay_out_poly(
    grad, x, mask, coef, scale, shift, residual, trials, want_residual
) -> tuple[list, Any]:
    x, mask, residual = _dense_inputs(x, mask, residual, trials)
    grad = dense(grad, 2 if trials else 1, item_order(x, _channel(x, mask, trials)))
    shared = is_shared(x, mask, trials), residual is not None and is_shared(residual, mask, trials)
    outputs = _new_gradients(grad, trials, *shared, want_residual)
    outputs.append(coef.new_zeros(coef.shape))
    outputs.append(None if scale is None else coef.new_zeros((2, coef.shape[1])))
    return outputs, (grad, x, mask, coef.contiguous(), scale, shift, residual)


def _poly_backward(*arguments) -> tuple[Tensor, ...]:
    trials = arguments[7]
    outputs, inputs = _lay_out_poly(*arguments)
    grad, x, mask, *_, residual = inputs
    kernel = kernels.choose(grad)
    if kernel is None:
        found = reference.masked_poly_backward(*inputs, *arguments[7:8])
        _copy(outputs, found)
    elif grad.numel():
        kernel.poly_backward(*outputs, *inputs, geometry(x, mask, residual, trials))
    return _none_to_empty(outputs)


def _copy(outputs: list, found: tuple) -> None:
    for out, value in zip(outputs, found, strict=True):
        if out is not None:
            out.copy_(value)


def _none_to_empty(outputs: list) -> tuple[Tensor, ...]:
    return tuple(outputs[0].new_empty(0) if t is None else t for t in outputs)


def _register(name: str, implementation: Any, fake: Any) -> None:
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastbcd::{name}", fake, lib=_library)


_register("masked_relu", lambda *a: _forward(_relu_into, *a), _forward_shape)
_register("masked_poly", lambda *a: _forward(_poly_into, *a), _forward_shape)
_register("masked_relu_out", lambda *a: _forward_out(_relu_into, *a), lambda *a: None)
_register("masked_poly_out", lambda *a: _forward_out(_poly_into, *a), lambda *a: None)
_register("masked_relu_backward", _relu_backward, lambda *a: _none_to_empty(_lay_out_relu(*a)[0]))
_register("masked_poly_backward", _poly_backward, lambda *a: _none_to_empty(_lay_out_poly(*a)[0]))


# -------------------------------------------------------------------------------- autograd


def _relu_setup(ctx, inputs, output) -> None:
    x, mask, scale, _, residual, ctx.trials = inputs
    affine = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    # Only the affine gradients look at x again; the activation's own need y alone.
    ctx.save_for_backward(output, mask, x if affine else None, scale)
    ctx.x_shared = is_shared(x, mask, ctx.trials)
    ctx.residual_shared = residual is not None and is_shared(residual, mask, ctx.trials)


def _relu_grads(ctx, grad):
    y, mask, x, scale = ctx.saved_tensors
    # dresidual = dz = dx, one tensor for both, unless a scale or a sum over trials parts them.
    same = scale is None and ctx.x_shared == ctx.residual_shared
    needs_residual = ctx.needs_input_grad[4]
    dx, dresidual, daffine = torch.ops.fastbcd.masked_relu_backward.default(
        grad, y, mask, x, scale, ctx.trials,
        ctx.x_shared, ctx.residual_shared, needs_residual and not same,
    )  # fmt: skip
    if needs_residual and same:
        dresidual = dx
    dscale, dshift = (None, None) if x is None else daffine
    return dx, None, dscale, dshift, dresidual if needs_residual else None, None


def _poly_setup(ctx, inputs, output) -> None:
    x, mask, coef, scale, shift, residual, ctx.trials = inputs
    ctx.save_for_backward(x, mask, coef, scale, shift, residual)


def _poly_grads(ctx, grad):
    x, mask, coef, scale, shift, residual = ctx.saved_tensors
    needs_residual = ctx.needs_input_grad[5]
    dx, dresidual, dcoef, daffine = torch.ops.fastbcd.masked_poly_backward.default(
        grad, x, mask, coef, scale, shift, residual, ctx.trials, needs_residual
    )
    dscale, dshift = (None, None) if scale is None else daffine
    return dx, None, dcoef, dscale, dshift, dresidual if needs_residual else None, None


torch.library.register_autograd(
    "fastbcd::masked_relu", _relu_grads, setup_context=_relu_setup, lib=_library
)
torch.library.register_autograd(
    "fastbcd::masked_poly", _poly_grads, setup_context=_poly_setup, lib=_library
)
