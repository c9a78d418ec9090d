"""norm_masked: batch norm in train mode, residual and masked activation in one op."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd.graph.fuse import NormActivation
from fastbcd.masking.activations import REPLACEMENTS


@pytest.mark.parametrize("activation", REPLACEMENTS.values())
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 24), st.integers(1, 4), st.booleans(), st.booleans(),
    st.floats(-20, 20),
)  # fmt: skip
def test_norm_and_activation_in_one_call(
    activation, batch, channels, side, residual, same_grad, mean
) -> None:
    """Against double precision: hardly worse than torch's own batch norm, both ways."""
    assume(batch * side > 1)
    torch.manual_seed(0)
    shape = (batch, channels, side, side)
    x, r = torch.randn(shape) * 2 + mean, torch.randn(shape)
    # The gradient of a sum is expanded, not dense.
    grad = torch.ones(1).expand(shape) if same_grad else torch.randn(shape)
    act = activation(shape[1:])
    if activation is not fastbcd.MaskedReLU:
        nn.init.uniform_(act.coef, -1, 1)
    act.mask.copy_(torch.rand(shape[1:]) < 0.5)
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, -1, 1)
    nn.init.uniform_(norm.bias, -1, 1)
    with torch.no_grad():
        z = copy.deepcopy(norm).double()(x.double()) + (r.double() if residual else 0)
    if (near := z.abs() < 1e-4).any():  # rounding may put these on either side of the ReLU
        grad = grad.masked_fill(near, 0)
    found = []
    for dtype, one_call in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        pair = NormActivation(copy.deepcopy(norm), copy.deepcopy(act)).to(dtype)
        order = torch.channels_last if one_call else torch.contiguous_format
        a, b = (t.detach().to(dtype).clone(memory_format=order).requires_grad_() for t in (x, r))
        if one_call:
            y = pair(a, b if residual else None)
            assert "_NormMasked" in y.grad_fn.name()
        else:
            y = pair.act(pair.norm(a) + b if residual else pair.norm(a))
        y.backward(grad.to(dtype))
        tensors = [y.detach(), a.grad, pair.norm.weight.grad, pair.norm.bias.grad,
                   pair.norm.running_mean, pair.norm.running_var]  # fmt: skip
        found.append(
            tensors + ([b.grad] if residual else []) + [p.grad for p in pair.act.parameters()]
        )
        assert int(pair.norm.num_batches_tracked) == 1
    for truth, plain, ours in zip(*found, strict=True):
        size = truth.abs().max() + 0.1  # a gradient may be 0 by cancellation of terms of size 1
        error = (ours - truth).abs().max() / size
        # The mean in standard deviations is lost in precision, see fastbcd/ops/norm.py.
        least = 1e-5 * (1 + abs(mean) / 2)
        assert error <= 2 * (plain - truth).abs().max() / size + least


def test_frozen_and_evaluated_norms_use_their_own_statistics() -> None:
    norm, act = nn.BatchNorm2d(3).eval(), fastbcd.MaskedReLU((3, 4, 4))
    x = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    before = copy.deepcopy(norm.state_dict())
    assert torch.equal(NormActivation(norm, act)(x), act(norm(x)))
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())
