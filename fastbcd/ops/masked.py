"""The masked activations: one operator, y = act(x*scale + shift + residual) with a bit per neuron.

masked_relu, masked_line, masked_poly    relu(z) where the bit is 1; z, a line, a quadratic else
soft_relu                                SNL: real numbers in place of the bits
indicator_poly                           AutoReP: the bits have a gradient
saliency                                 the backward also sums the effect of every removal
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

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
from fastbcd.ops.arguments import (
    DTYPES,
    check_arguments,
    check_items,
    check_out,
    check_small,
)
from fastbcd.ops.calls import KernelCall, contiguous
from fastbcd.ops.registry import OPERATORS, Operator, compute, define

SIGNED = 1  # what the backward sums for each unit; 2: absolute values
REPLACEMENTS = {0: "identity", 2: "line", 3: "quadratic"}  # by the rows of coef


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
    return masked(
        x, mask, scale=scale, shift=shift, residual=residual, trials=trials, out=out
    )


def masked_line(
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
    """relu(z) where the mask's bit is 1, else c1*z + c0, with z = x*scale + shift + residual.

    coef is [2, C] (one line per channel) or [2] (one for the layer), in the order c0, c1.
    Everything else is as in `masked_relu`.

    Equivalent to: torch.where(mask, torch.relu(z), c1*z + c0)

    >>> line = torch.tensor([1.0, 0.5])
    >>> masked_line(torch.tensor([[-3.0, -3.0]]), torch.tensor([True, False]), line)
    tensor([[ 0.0000, -0.5000]])
    """
    _check_rows(coef, x, 2)
    return masked(
        x,
        mask,
        coef,
        scale=scale,
        shift=shift,
        residual=residual,
        trials=trials,
        out=out,
    )


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
    _check_rows(coef, x, 3)
    return masked(
        x,
        mask,
        coef,
        scale=scale,
        shift=shift,
        residual=residual,
        trials=trials,
        out=out,
    )


def soft_relu(x: Tensor, alpha: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """a*relu(z) + (1 - a)*z with z = x + residual: a ReLU for a = 1, the identity for a = 0.

    Args:
        x: [B, *S].
        alpha: [*S] floating-point, one number per unit; not copied if in x's memory order.
        residual: added before the activation, shaped like x.

    Equivalent to: torch.where(z > 0, z, (1 - alpha) * z)

    >>> soft_relu(torch.tensor([[-2.0, -2.0, 3.0]]), torch.tensor([1.0, 0.25, 0.5]))
    tensor([[-0.0000, -1.5000,  3.0000]])
    """
    y = _masked.unchecked(x, alpha, None, None, None, residual, None, False, 0)
    if y is not None and alpha.is_floating_point():
        return y
    check_small("alpha", alpha, x, tuple(x.shape[1:]))
    check_items(x, alpha, residual)
    return _masked(
        x, alpha.to(compute_dtype(x.dtype)), None, None, None, residual, None, False, 0
    )


def indicator_poly(
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    aux: Tensor,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """`masked_poly`, with a gradient for the numbers that decide its bits.

    Args:
        x: [B, *S].
        mask: [*S] bool or uint8: the current bits. The caller derives them from aux.
        coef: [3, C] as in `masked_poly`.
        aux: [*S] floating-point. Its gradient is that of the bit, straight through:
            softplus(aux) * sum over the batch of grad * (relu(z) - poly(z))
        residual: added before the activation, shaped like x.

    Equivalent to: masked_poly(x, mask, coef, residual=residual)

    >>> aux = torch.zeros(2, requires_grad=True)
    >>> y = indicator_poly(torch.tensor([[-3.0, 2.0]]), aux > -1, torch.zeros(3, 2), aux)
    >>> y.sum().backward()
    >>> y.tolist(), aux.grad
    ([[0.0, 2.0]], tensor([0.0000, 1.3863]))
    """
    check_arguments(x, mask, None, None, residual, False)
    check_small("aux", aux, x, tuple(x.shape[1:]))
    check_small("coef", coef, x, (3, x.shape[1]))
    small = compute_dtype(x.dtype)
    units = _StraightThrough.apply(aux.to(small))
    return _masked(x, mask, coef.to(small), None, None, residual, units, False, SIGNED)


class _StraightThrough(torch.autograd.Function):
    """aux in place of the bits: their gradient, times softplus(aux), becomes its own."""

    @staticmethod
    def forward(ctx: Any, aux: Tensor) -> Tensor:
        ctx.save_for_backward(aux)
        return aux.view_as(aux)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (aux,) = ctx.saved_tensors
        return softplus(aux) * grads[0]


def saliency(
    x: Tensor,
    mask: Tensor,
    anchor: Tensor,
    totals: Tensor,
    *,
    absolute: bool,
    coef: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A masked activation; its backward adds the effect of removing each ReLU to `totals`.

    Removing the ReLU of a kept unit adds r(z) - relu(z) to its output (min(z, 0) for the identity),
    which changes the loss by grad times that to first order. Returning a removed ReLU undoes its
    removal and has the opposite effect, so that the sums are of all units.

    Args:
        x: [B, *S]. mask: [*S]. coef: [2 or 3, C]. residual: shaped like x.
        anchor: any tensor that requires a gradient. It never gets one; it makes autograd run
            this backward even if nothing before the activation requires a gradient.
        totals: DoubleTensor[*S]; the backward adds the sum over the batch of the effects, or of
            their absolute values.

    >>> x, totals = torch.tensor([[-2.0, -3.0, 4.0]]), torch.zeros(3, dtype=torch.float64)
    >>> mask, anchor = torch.tensor([True, False, True]), torch.zeros((), requires_grad=True)
    >>> saliency(x, mask, anchor, totals, absolute=True).sum().backward()
    >>> totals
    tensor([2., 3., 0.], dtype=torch.float64)
    """
    small = compute_dtype(x.dtype)
    units = _Effects.apply(anchor, totals, small, absolute)
    if coef is not None:
        coef = coef.detach().to(small)
    return _masked(x, mask, coef, None, None, residual, units, False, SIGNED + absolute)


class _Effects(torch.autograd.Function):
    """In place of the bits: their gradient is added to totals."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, totals: Tensor, dtype: Any, absolute: bool
    ) -> Tensor:
        ctx.totals = totals
        ctx.sign = 2 * absolute - 1  # a removal takes away what the bit adds
        return totals.new_empty(totals.shape, dtype=dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sums: Tensor) -> Any:
        ctx.totals.add_(sums, alpha=ctx.sign)
        return None, None, None, None


def masked(
    x: Tensor,
    mask: Tensor,
    coef: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    trials: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`masked_relu` without coef, `masked_line` with coef [2, C], `masked_poly` with [3, C]."""
    # Small tensors wait for the checks. Other shapes than those of images may be ambiguous.
    if out is None and not trials and (trials is False or x.ndim == 4):
        y = _masked.unchecked(x, mask, coef, scale, shift, residual, None, False, 0)
        if y is not None:
            return y
    trials = check_arguments(x, mask, scale, shift, residual, trials)
    if coef is not None:
        rows = len(coef)
        channels = mask.shape[int(trials)]
        check_small("coef", coef, x, (rows, channels), (rows,))
        coef = coef.reshape(rows, -1).expand(rows, channels)
    small = [in_dtype(t, compute_dtype(x.dtype)) for t in (coef, scale, shift)]
    if out is None:
        return _masked(x, mask, *small, residual, None, trials, 0)
    check_out(out, x, mask, trials, (*small, residual))
    OPERATORS["masked_out"](x, mask, *small, residual, trials, out)
    return out


def in_dtype(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """t in the dtype; `to` costs 1 µs even where it returns its argument."""
    if t is None or t.dtype == dtype:
        return t
    return t.to(dtype)


def _check_rows(coef: Tensor, x: Tensor, rows: int) -> None:
    """coef has one row for each power of z."""
    if coef.ndim == 0 or coef.shape[0] != rows:
        raise ValueError(
            f"coef has shape {tuple(coef.shape)}; x {tuple(x.shape)} needs ({rows}, C) or ({rows},)"
        )


def _lay_out(x, mask, *parameters, out=None) -> KernelCall:
    """The layout of a forward; parameters: coef, scale, shift, residual, units, trials, ..."""
    coef, scale, shift, residual, _, trials, *_ = parameters
    mask, x, residual = dense_together(mask, trials, x, residual)
    if out is None:
        out = new_output(x, mask, trials)
    return KernelCall(
        outputs=[out],
        inputs=(x, mask, *map(contiguous, (coef, scale, shift)), residual),
        geometry=(x, mask, trials, *are_shared(mask, trials, x, residual)),
        variant=variant(mask, coef),
        fits=not mask.is_floating_point() or (scale is None and not trials),
    )


def variant(mask: Tensor, coef: Tensor | None, units: int = 0) -> str:
    """What is a constant in the code of a kernel, besides dtypes and memory orders."""
    rows = 0
    if coef is not None:
        rows = len(coef)
    soft = "soft" * mask.is_floating_point()
    words = soft, REPLACEMENTS[rows], ("", "signed", "absolute")[units]
    return " ".join(filter(None, words))


def _lay_out_backward(
    grad, y, x, mask, coef, scale, shift, residual, trials, x_shared, residual_shared,
    want_residual, want_small, units,
) -> KernelCall:  # fmt: skip
    mask, y, x, residual, grad = dense_together(mask, trials, y, x, residual, grad)
    rows = 2 * (scale is not None)
    if coef is not None:
        rows += len(coef)
    channels = mask.shape[int(trials)]
    small = compute_dtype(grad.dtype)
    dresidual = dsmall = dunits = None
    if want_residual:
        dresidual = new_gradient(grad, residual_shared)
    if want_small and rows:
        dsmall = grad.new_empty((rows, channels), dtype=small)
    if units:
        dunits = grad.new_empty_strided(grad.shape[1:], grad.stride()[1:], dtype=small)
    return KernelCall(
        outputs=[new_gradient(grad, x_shared), dresidual, dsmall, dunits],
        inputs=(
            grad,
            y,
            x,
            mask,
            *map(contiguous, (coef, scale, shift)),
            residual,
            units == 2,
        ),
        geometry=(grad, mask, trials, x_shared, residual_shared),
        variant=variant(mask, coef, units),
        fits=not (mask.is_floating_point() or units) or (scale is None and not trials),
    )


def _short(x, mask, coef, scale, shift, residual, units, trials, kind) -> Tensor | None:
    """The result of C++ that compares shapes, dtypes and strides, and takes memory as it is."""
    if x.dtype not in DTYPES or trials or kind:
        return None
    plain = kernels.choose("masked_plain", x)
    if plain is None:
        return None
    return plain(x, mask, coef, scale, shift, residual)


def _short_backward(
    grad, y, x, mask, coef, scale, shift, residual, trials, *flags
) -> Any:
    plain = kernels.choose("masked_backward_plain", grad)
    *_, want_residual, want_small, units = flags
    if plain is None or trials or (units and not mask.is_floating_point()):
        return None
    gradients = plain(
        grad, y, x, mask, coef, scale, shift, residual, want_residual, want_small
    )
    if gradients[0] is None:
        return None
    return gradients


_INPUTS = "Tensor? coef, Tensor? scale, Tensor? shift, Tensor? residual"
_masked = define(
    f"masked(Tensor x, Tensor mask, {_INPUTS}, Tensor? units, bool trials, int kind) -> Tensor",
    _lay_out,
    _short,
)
_masked_backward = define(
    f"masked_backward(Tensor grad, Tensor? y, Tensor? x, Tensor mask, {_INPUTS}, bool trials, "
    f"bool x_shared, bool residual_shared, bool want_residual, bool want_small, int units) "
    f"-> (Tensor dx, Tensor dresidual, Tensor dsmall, Tensor dunits)",
    _lay_out_backward,
    _short_backward,
)


def _write(x, mask, coef, scale, shift, residual, trials, out) -> None:
    """The operator that writes into its last argument."""
    inputs = (x, mask, coef, scale, shift, residual, None, trials, 0)
    call = _lay_out(*inputs, out=out)
    if _writable(out, call):
        compute("masked_forward", call, inputs)
    else:
        out.copy_(_masked.run(*inputs))
    if not out.is_inference():
        # A graph that saved `out` before now raises in its backward.
        torch.autograd.graph.increment_version(out)


Operator(
    f"masked_out(Tensor x, Tensor mask, {_INPUTS}, bool trials, Tensor(a!) out) -> ()",
    _write,
    lambda *arguments: None,
)


def _writable(out: Tensor, call: KernelCall) -> bool:
    """Can a kernel write into `out`: dense in x's order, and no input partly in its memory?"""
    x, _, trials, x_shared, _ = call.geometry
    channel = 1 + trials
    if not in_order(out, channel, item_order(x, channel - x_shared)):
        return False
    return not any(_overlap(t, out) for t in call.inputs if t is not None)


def _overlap(t: Tensor, out: Tensor) -> bool:
    """Do two dense tensors share a part of their memory, without being the same elements?"""
    start = t.data_ptr() - out.data_ptr()
    if start == 0 and t.shape == out.shape and t.dtype == out.dtype:
        return False
    return -t.nbytes < start < out.nbytes


def _setup(ctx, inputs, output) -> None:
    x, mask, coef, scale, shift, residual, units, trials, ctx.kind = inputs
    ctx.shared = (trials, *are_shared(mask, trials, x, residual))
    saved = [None, x, mask, coef, scale, shift, residual]
    if coef is None and units is None and not mask.is_floating_point():
        # The output alone tells which elements passed; only the affine gradients need x.
        saved = [output, None, mask, None, scale, None, None]
        if any(ctx.needs_input_grad[3:5]):
            saved[1] = x
    ctx.save_for_backward(*saved)


def _gradients(ctx, grad):
    needed = ctx.needs_input_grad
    _, x_shared, residual_shared = ctx.shared
    saved = ctx.saved_tensors
    coef, scale = saved[3:5]
    small = any(needed[2:5])
    # dresidual = dz = dx, one tensor for both, unless a scale or a sum over trials differs.
    same = scale is None and x_shared == residual_shared
    dx, dresidual, dsmall, dunits = _masked_backward.derivative(
        grad,
        *saved,
        *ctx.shared,
        needed[5] and not same,
        small,
        ctx.kind or int(needed[1]),
    )
    if same:
        dresidual = dx
    dcoef = dscale = dshift = None
    if small:
        rows = 0
        if coef is not None:
            rows = len(coef)
            dcoef = dsmall[:rows]
        if scale is not None:
            dscale, dshift = dsmall[rows:]
    gradients = dx, dunits, dcoef, dscale, dshift, dresidual, dunits, None, None
    return tuple(g if need else None for g, need in zip(gradients, needed, strict=True))


_masked.differentiate(_setup, _gradients)
