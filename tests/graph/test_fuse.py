"""The rewriting for training: fewer calls, the same function."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd.graph import cpu_conv as convolution
from fastbcd.graph.fuse import fused
from fastbcd.graph.fuse_norm import NormActivation
from helpers.nets import images, make, thinned


class ByHand(nn.Module):
    """act(x + shortcut) with activations placed by hand, in the ways people write it."""

    def __init__(self, act: type) -> None:
        super().__init__()
        self.conv, self.skip = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(3, 6, 1)
        self.acts = nn.ModuleList([act((6, 8, 8)) for _ in range(4)])
        self.drop, self.head = nn.Dropout(0.0, inplace=True), nn.Linear(6, 5)

    def forward(self, x):
        a, b = self.conv(x), self.skip(x)
        y = self.acts[0](a + b)
        y = self.acts[1](torch.add(y, b))
        z = y + a
        y = self.acts[2](z) + self.drop(z)  # the sum is read twice
        y += 0.5
        return self.head(self.acts[3](y.add(1.0)).mean((2, 3)))


@pytest.mark.parametrize("act", [fastbcd.MaskedReLU, fastbcd.MaskedPoly])
def test_fused_by_hand(act) -> None:
    torch.manual_seed(0)
    check_fused(thinned(ByHand(act)), 3)


@pytest.mark.parametrize(("name", "count"), [("resnet", 2), ("poly", 1), ("preactivation", 0)])
def test_fused_converted(name, count) -> None:
    check_fused(thinned(make(name)), count)


def check_fused(net: nn.Module, count: int) -> None:
    """The same forward, backward and statistics; `count` additions became part of a call."""
    model, order = fused(net)
    called = [n.target for n in model.graph.nodes if n.op == "call_module" and len(n.args) == 2]
    twin = copy.deepcopy(net)
    assert {id(p) for p in model.parameters()} == {id(p) for p in net.parameters()}
    x = images(9)[0].contiguous(memory_format=order)
    results = []
    for module, source in ((model.train(), x), (twin.train(), x.contiguous())):
        source = source.clone().requires_grad_()
        y = module(source)
        (y.square().sum()).backward()
        results.append((y, source.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(net.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
    assert len(called) == count


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 24), st.integers(1, 4), st.booleans(), st.booleans(),
    st.floats(-100, 100),
)  # fmt: skip
def test_norm_and_activation_in_one_call(batch, channels, side, residual, same_grad, mean) -> None:
    """Against double precision: no worse than torch's own batch norm, forward and backward."""
    assume(batch * side > 1)
    torch.manual_seed(0)
    shape = (batch, channels, side, side)
    x, r = torch.randn(shape) * 2 + mean, torch.randn(shape)
    # The gradient of a sum is expanded, not dense.
    grad = torch.ones(1).expand(shape) if same_grad else torch.randn(shape)
    act = fastbcd.MaskedReLU(shape[1:])
    act.mask.copy_(torch.rand(shape[1:]) < 0.5)
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, -1, 1)
    nn.init.uniform_(norm.bias, -1, 1)
    found = []
    for dtype, one_call in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        pair = NormActivation(copy.deepcopy(norm), copy.deepcopy(act)).to(dtype)
        order = torch.channels_last if one_call else torch.contiguous_format
        a, b = (t.detach().to(dtype).clone(memory_format=order).requires_grad_() for t in (x, r))
        if one_call:
            y = pair(a, b if residual else None)
            assert type(y.grad_fn).__name__ == "_NormActivationBackward"
        else:
            y = pair.act(pair.norm(a) + b if residual else pair.norm(a))
        y.backward(grad.to(dtype))
        tensors = [y.detach(), a.grad, pair.norm.weight.grad, pair.norm.bias.grad,
                   pair.norm.running_mean, pair.norm.running_var]  # fmt: skip
        found.append(tensors + ([b.grad] if residual else []))
        assert int(pair.norm.num_batches_tracked) == 1
    # Where z is within rounding of 0 its ReLU may fall to either side.
    edge = bool((found[0][0].abs() < 1e-5).logical_and(found[0][0] != 0).any())
    for truth, plain, ours in zip(*found, strict=True):
        size = truth.abs().max() + 1e-6
        error = (ours - truth).abs().max() / size
        assert edge or error <= 2 * (plain - truth).abs().max() / size + 1e-5


@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (1, 5), (2, 1)])
def test_better_convolutions_are_the_same(stride, kernel) -> None:
    torch.manual_seed(0)
    channels = 4 if kernel == 1 else 128
    conv = nn.Conv2d(channels, 8, kernel, stride, kernel // 2, bias=kernel == 3)
    better = convolution.for_training(conv)
    assert type(better) is not nn.Conv2d
    results = []
    for module in (conv, better):
        x = torch.randn(5, channels, 9, 7, generator=torch.Generator().manual_seed(1))
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        y = module(x) if module is better else conv(x.contiguous())
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in conv.parameters())])
        conv.zero_grad(set_to_none=True)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_masks_set_later_reach_the_fused_net() -> None:
    net = make("resnet")
    model, _ = fused(net, train=False)
    thinned(net, 0.3)
    x = images(4)[0]
    torch.testing.assert_close(model.eval()(x), net.eval()(x))


def test_an_untraceable_net_is_said_once() -> None:
    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    net = Odd()
    with pytest.warns(RuntimeWarning, match="Odd runs as it is"):
        assert fused(net)[0] is net
    assert fused(net)[1] == torch.contiguous_format
