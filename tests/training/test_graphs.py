"""Forward and backward of a training step as CUDA graphs, on the simulated device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.training import graphs
from fastbcd.training.loop import Trainer

IMAGES = 12 * 8 + 4  # twelve batches of eight, and a smaller one


def resnet() -> nn.Module:
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(num_classes=3, image_size=8, replacement="line")
    masks = fastbcd.masks(net)
    fastbcd.set_masks(net, masks.without(masks.sample(3000, seed=0, step=0, trial=0)))
    return net


def train(net: nn.Module) -> None:
    x = torch.rand(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = fastbcd.ImageData.from_arrays(x, torch.arange(IMAGES) % 3).to("cuda")
    settings = fastbcd.Finetune(batch_size=8, amp=False, padding=1)
    trainer = Trainer(net.to("cuda"), data, settings)
    with trainer.session() as session:
        for epoch in range(2):
            session.epoch(epoch, lr=0.01)


def test_a_replayed_step_trains_the_same_net(gpu, monkeypatch) -> None:
    """Parameters and running statistics, with a last batch that is smaller."""
    states, launches = [], []
    for before in (1000, 2):
        monkeypatch.setattr(graphs, "EAGER", before)
        gpu.reset()
        net = resnet()
        train(net)
        states.append({name: t.cpu() for name, t in net.state_dict().items()})
        launches.append(gpu.counts["launch"])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert launches[1] < launches[0] / 2


class Waiting(nn.Module):
    """A net that asks the device for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = fastbcd.MaskedReLU((4, 6, 6))
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.conv(x)).mean((2, 3))
        return self.out(-y if y.sum().item() > 1e9 else y)


@pytest.mark.filterwarnings("ignore:Waiting runs as it is")  # it cannot be traced, either
def test_what_cannot_be_captured_is_trained_call_by_call(gpu) -> None:
    net = Waiting()
    before = net.conv.weight.detach().clone()
    with pytest.warns(RuntimeWarning, match=r"without CUDA graphs.*is capturing: sync"):
        train(net)
    assert not torch.equal(net.conv.weight.detach().cpu(), before)


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda x: x.sum().item(), "sync"),
        (lambda x: x.cpu(), "d2h"),
        (lambda x: x + torch.ones(3).to("cuda"), "h2d"),
        (lambda x: torch.zeros(3, device="cuda:1"), "outside of the pool"),
    ],
)
def test_the_simulated_device_refuses_in_a_capture(gpu, operation, reason) -> None:
    x = torch.ones(3, device="cuda")
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=reason),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        operation(x)


def test_the_simulated_graph_replays_into_the_same_memory(gpu) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = torch.relu(x * 2).add_(1)
    x.fill_(-1.0)
    graph.replay()
    assert y.tolist() == [1.0, 1.0, 1.0]


def test_a_simulated_replay_refuses_another_shape(gpu) -> None:
    graphed = torch.cuda.make_graphed_callables(
        nn.Linear(3, 2).to("cuda"), (torch.ones(4, 3, device="cuda"),)
    )
    assert graphed(torch.ones(4, 3, device="cuda")).shape == (4, 2)
    with pytest.raises(RuntimeError, match="size"):
        graphed(torch.ones(2, 3, device="cuda"))
