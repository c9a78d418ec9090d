"""Folded batch norm: the same outputs with fewer kernel launches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.graph.fold import folded
from fastbcd.training.teacher import FrozenNet
from helpers.nets import make
from helpers.train_cases import pair, weights


def with_statistics(net: nn.Module) -> nn.Module:
    """The net with batch norms that are not the identity, in eval mode."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return net.eval()


def norms(net: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())


@pytest.mark.parametrize(
    ("net", "left"),
    [
        (fastbcd.models.resnet18(5, 8, width=4), 0),
        (fastbcd.models.resnet20(5, 8, width=4, blocks=1), 0),
        (fastbcd.models.wide_resnet22_8(5, 8, factor=1), 10),  # norms before a convolution
    ],
)
def test_a_folded_net_computes_the_same(net, left) -> None:
    net = with_statistics(net)
    before = weights(net)
    x = torch.randn(6, 3, 8, 8)
    small = folded(net)
    assert norms(small) == left < norms(net)
    torch.testing.assert_close(small(x), net(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in weights(net).items())


class Twice(nn.Module):
    """A convolution, a norm and their pair, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.more = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.norm(self.conv(self.norm(self.conv(x))))
        z = self.other(y)
        return self.more(z) + z


def test_what_is_called_or_read_twice_is_not_folded() -> None:
    net, x = with_statistics(Twice()), torch.randn(2, 3, 8, 8)
    assert norms(folded(net)) == 2
    torch.testing.assert_close(folded(net)(x), net(x))


def test_a_teacher_launches_no_norms(gpu) -> None:
    """One launch per norm less; in half precision none casts the weights of convolutions."""
    net = with_statistics(make("resnet")).cuda()
    data = pair(8).to("cuda")
    batch = next(data.batches(8))[0]
    launches = []
    for teacher in (FrozenNet(net, data), FrozenNet(net, data, half=torch.bfloat16)):
        gpu.reset()
        teacher.of(batch)
        launches.append(gpu.counts["launch"])
    plain = copy.deepcopy(net).requires_grad_(False)
    gpu.reset()
    plain(batch)
    assert launches[0] == gpu.counts["launch"] - norms(net)
    assert launches[1] == launches[0] + 2  # the images to half precision, the logits back
