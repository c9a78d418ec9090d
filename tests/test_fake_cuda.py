"""The fake CUDA device: its rules, counters and memory."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

import fastbcd
from helpers import fake_cuda


def test_it_is_there_on_a_cpu_build_with_a_compiler() -> None:
    if not torch.backends.cuda.is_built() and shutil.which("g++"):
        assert fake_cuda.REASON == ""


def test_tensors_are_on_their_device(gpu) -> None:
    x = torch.zeros(3, device="cuda")
    assert x.device == torch.device("cuda:0")
    assert x.is_cuda
    assert x.to("cuda:1").device == torch.device("cuda:1")
    assert torch.tensor([1], device="cuda:1").device.index == 1
    assert x.new_zeros(2).device == x.device
    assert type(x.cpu()) is torch.Tensor
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device.index == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        x.to("cuda:2")
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_devices_do_not_mix(gpu) -> None:
    x = torch.ones(3, device="cuda")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number may be on the CPU
    assert x[torch.tensor([0, 1])].tolist() == [1, 1]  # and the indices of a tensor
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + other
    with pytest.raises(RuntimeError, match="same device"):
        torch.arange(3)[torch.tensor([0], device="cuda")]


def test_what_is_counted(gpu) -> None:
    x = torch.ones(4).to("cuda")
    assert gpu.counts == {"h2d": 1}
    gpu.reset()
    y = (x * 2).view(2, 2)
    assert gpu.counts == {"launch": 1}
    gpu.reset()
    assert y.sum().item() == 8
    assert gpu.counts["sync"] == 1
    gpu.reset()
    y.cpu()
    assert (gpu.counts["d2h"], gpu.counts["sync"]) == (1, 1)
    gpu.reset()
    x[x > 0]
    assert gpu.counts["sync"] == 1


def test_pinned_memory_is_copied_without_waiting(gpu) -> None:
    for x in (torch.ones(3).pin_memory(), torch.empty(3, pin_memory=True)):
        assert x.is_pinned()
        gpu.reset()
        x.copy_(x.to("cuda", non_blocking=True), non_blocking=True)
        assert gpu.counts == {"h2d": 1, "d2h": 1}
    assert not torch.ones(3).is_pinned()


@pytest.mark.parametrize("index", [0, 1])
def test_autograd_and_autocast(gpu, index) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    other, x = copy.deepcopy(layer), torch.randn(4, 3)
    layer(x).square().sum().backward()
    other.to(f"cuda:{index}")(x.to(f"cuda:{index}")).square().sum().backward()
    assert other.weight.grad.device.index == index
    torch.testing.assert_close(other.weight.grad.cpu(), layer.weight.grad)
    with torch.autocast("cuda", torch.bfloat16):
        assert other(x.to(f"cuda:{index}")).dtype == torch.bfloat16
    same = copy.deepcopy(other)
    assert same.weight.device == other.weight.device
    assert same.weight is not other.weight
    assert other.half().weight.dtype == torch.float16


def test_memory_is_limited_and_freed() -> None:
    with fake_cuda.device(memory=1000) as gpu:
        x = torch.zeros(100, device="cuda")
        view = x[50:]
        assert torch.cuda.memory_allocated() == 400
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.zeros(200, device="cuda")
        torch.zeros(200, device="cuda:1")
        del x
        assert gpu.allocated[0] == 400  # the view still needs it
        del view
        assert gpu.allocated[0] == 0
        assert torch.cuda.mem_get_info() == (600, 1000)  # torch's cache has the rest
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info() == (1000, 1000)


def test_ops_take_the_kernels(gpu) -> None:
    """One launch, with the bits of the CPU's kernel."""
    x, mask = torch.randn(2, 3, 4, 4), torch.rand(3, 4, 4) > 0.5
    mine, there = x.clone().requires_grad_(), x.to("cuda").requires_grad_()
    on_gpu = mask.to("cuda")
    gpu.reset()
    y = fastbcd.ops.masked_relu(there, on_gpu)
    assert gpu.counts == {"launch": 1}
    y.backward(torch.ones_like(y))
    expected = fastbcd.ops.masked_relu(mine, mask)
    expected.backward(torch.ones_like(expected))
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(there.grad.cpu(), mine.grad)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        fastbcd.ops.masked_relu(there, mask)


def test_everything_is_as_before_afterwards() -> None:
    available, tensor = torch.cuda.is_available, torch.tensor
    with fake_cuda.device():
        assert torch.cuda.is_available()
    assert torch.cuda.is_available is available
    assert torch.tensor is tensor
    assert fastbcd.backends()[1].module is None
