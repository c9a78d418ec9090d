"""fused: fewer calls, the same function."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.graph import cpu_conv
from fastbcd.graph.fuse import fused
from fastbcd.graph.trace import trace
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
    check_fused(thinned(ByHand(act)), 2)


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


@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (1, 5), (2, 1)])
def test_better_convolutions_are_the_same(stride, kernel) -> None:
    torch.manual_seed(0)
    channels = 4 if kernel == 1 else 128
    conv = nn.Conv2d(channels, 8, kernel, stride, kernel // 2, bias=kernel == 3)
    better = cpu_conv.for_training(conv)
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


def test_the_accuracy_leaves_modules_in_their_mode() -> None:
    """One in eval mode would count as frozen in the next training."""
    net = make("resnet").train()
    net.get_submodule("1").eval()
    modes = {name: module.training for name, module in net.named_modules()}
    fastbcd.accuracy(net, images(9))
    assert {name: module.training for name, module in net.named_modules()} == modes


def test_an_untraceable_net_is_reported_once() -> None:
    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    net = Odd()
    with pytest.warns(RuntimeWarning, match="Odd runs as it is"):
        assert fused(net)[0] is net
    assert fused(net)[1] == torch.contiguous_format


class TakesResidual(nn.Module):
    """A net that passes the residual to the activation itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(192, 6), fastbcd.MaskedReLU(6)

    def forward(self, x):
        y = self.linear(x.flatten(1))
        return self.act(self.act(y, y), residual=self.linear(x.flatten(1)))


def test_a_residual_passed_by_hand_is_an_addition_in_the_graph() -> None:
    net = thinned(TakesResidual())
    calls = [n for n in trace(net).nodes if n.target == "act"]
    assert [len(n.args) + len(n.kwargs) for n in calls] == [1, 1]
    x = images(4)[0]
    torch.testing.assert_close(fused(net)[0](x), net(x))


@pytest.mark.parametrize("act", [fastbcd.MaskedReLU, fastbcd.MaskedPoly])
@pytest.mark.parametrize("residual", [2.0, torch.ones(6, 1, 1), torch.ones(2, 6, 4, 4).double()])
def test_a_residual_is_added_like_any_tensor(act, residual) -> None:
    """A number, a tensor that is broadcast, another dtype."""
    act, x = thinned(act((6, 4, 4))), torch.randn(2, 6, 4, 4)
    torch.testing.assert_close(act(x, residual), act(x + residual))


class WritesIntoAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3), fastbcd.MaskedReLU((4, 6, 6))

    def forward(self, x):
        y = self.act(self.conv(x))
        part = y[:, :1]
        part.add_(50.0)
        return y.mean((2, 3))


@pytest.mark.filterwarnings("ignore:.*writes into memory that is read later")
def test_a_net_that_writes_into_a_view_runs_as_it_is() -> None:
    net, x = WritesIntoAView().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(fused(net, train=False)[0](x), net(x))
