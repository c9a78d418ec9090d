"""Networks that torch.fx alone does not trace: shapes, constants and default arguments."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import ConversionError, convert


class Net(nn.Module):
    """function(x, relu(conv(x))), for odd code in forward."""

    def __init__(self, function) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.function = function
        self.scale = torch.tensor([2.0])  # neither a parameter nor a buffer

    def forward(self, x):
        return self.function(self, x, torch.relu(self.conv(x)))


def branches(net, x, y):
    if x.shape[1] == 3 and x.dtype == torch.float32 and x.shape[2:] == (8, 8):
        return y + 1
    raise ValueError("not reached")


def asserts(net, x, y):
    assert x.dim() == 4
    assert x.shape[1] == 3, f"3 channels, not {x.shape[1]}"
    batch, _, *sides = x.shape
    assert sides[0] == sides[1] <= max(x.shape[1], 8)
    return y.reshape(batch, -1)


def loops(net, x, y):
    for i in range(x.shape[1]):
        y = y + i
    for channel in y.unbind(1):
        y = y + channel.unsqueeze(1)
    return y[:, : int(y.shape[1] / 2)] / len(x.shape) * float(y.size(1)) * math.sqrt(x.shape[2])


def constants(net, x, y):
    y = y * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, -1, 1, 1) * net.scale
    y = y + torch.zeros(x.shape[0], 4, 1, 1, device=x.device, dtype=x.dtype)
    y = y * torch.arange(y.shape[1], dtype=x.dtype).view(1, -1, 1, 1) + torch.ones(y.shape)
    return y * torch.tensor(y.shape[1] ** -0.5) + torch.full((x.size(0), 1, 1, 1), 0.5)


@pytest.mark.parametrize("function", [branches, asserts, loops, constants])
def test_shapes_and_constants_are_traced_with_the_example(function, capfd) -> None:
    model = Net(function)
    net = convert(model, torch.randn(2, 3, 8, 8))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 8, 8)
        assert torch.equal(net(x), model(x))
    assert list(net.state_dict()) == ["conv.weight", "conv.bias", "relu.mask"]
    assert fastbcd.masks(net).count() == 256
    assert convert(Net(constants), torch.randn(2, 3, 8, 8)), "torch is as it was"
    loaded = pickle.loads(pickle.dumps(net))
    assert torch.equal(loaded(x), model(x))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_engines_run_them(engine) -> None:
    model = Net(lambda net, x, y: constants(net, x, branches(net, x, y)).mean((2, 3)))
    data = torch.randn(30, 3, 8, 8), torch.randint(0, 4, (30,))
    net = convert(model.eval(), data[0][:2])
    found = fastbcd.score(net, [[0, 1], [5, 200]], data, engine=engine)
    assert found.base_correct == int((model(data[0]).argmax(1) == data[1]).sum())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda net, x, y: y if x.sum() > 0 else 2 * y, "data"),
        (lambda net, x, y: y * int(x.argmax()), "data"),
        (lambda net, x, y: y if x.shape[0] == 2 else 2 * y, "batch size"),
        (lambda net, x, y: y if len(x) < 500 else 2 * y, "batch size"),
        (lambda net, x, y: y / float(x.shape[0]), "batch size"),
    ],
)
def test_data_and_batch_size_may_not_decide(function, reason, capfd) -> None:
    message = rf"test_tracing.py:\d+: control flow depends on the {reason}\); place fastbcd"
    with pytest.raises(ConversionError, match=message):
        convert(Net(function), torch.randn(2, 3, 8, 8))
    assert capfd.readouterr().err == ""


class Buffers(nn.Module):
    """Values that are computed from buffers, and control flow that depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("order", torch.tensor([2, 1, 0, 3]))
        self.register_buffer("times", torch.tensor(2))

    def forward(self, x):
        x = torch.relu(self.conv(x)) * (1 + self.scale).view(1, -1, 1, 1)
        for _ in range(int(self.times) if self.times else 5):
            x = x + self.scale[self.order.flip(0)].view(-1, 1, 1)
        return x.mean((2, 3))


@pytest.mark.parametrize("engine", ["sequential", "stacked", "auto"])
def test_values_computed_from_buffers_follow_them(engine) -> None:
    model, other = Buffers().eval(), Buffers().eval()
    data = torch.randn(20, 3, 6, 6), torch.randint(0, 4, (20,))
    net = convert(model, data[0][:2])
    other.scale.copy_(torch.randn(4))
    other.order.copy_(torch.tensor([3, 3, 0, 1]))
    net.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(net(data[0]), other(data[0]))
    found = fastbcd.score(net, [[0, 1]], data, engine=engine)
    assert found.base_correct == int((other(data[0]).argmax(1) == data[1]).sum())


class StraightThrough(torch.autograd.Function):
    """A rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Clipped(StraightThrough):
    """A ReLU with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0)


def test_functions_keep_their_gradients() -> None:
    model = Net(lambda net, x, y: StraightThrough.apply(y, 0.25))
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"StraightThrough \(round\): 256 elements"):
        net = convert(model, x)
    for m in (model, net, copy.deepcopy(net)):
        m.zero_grad()
        m(x).square().sum().backward()
        assert m.conv.weight.grad.abs().sum() > 0
        torch.testing.assert_close(m.conv.weight.grad, model.conv.weight.grad)
    assert torch.autograd.Function.apply.__qualname__ == "Function.apply"
    with pytest.raises(ConversionError, match=r"'Clipped' \(function\) computes clamp inside"):
        convert(Net(lambda net, x, y: Clipped.apply(y)), x)


def test_threads_convert_at_once() -> None:
    before = vars(torch.autograd.Function)["apply"]
    model, x = Net(branches), torch.randn(2, 3, 8, 8)
    with ThreadPoolExecutor(3) as pool:
        nets = list(pool.map(lambda _: convert(model, x), range(6)))
    assert all(torch.equal(net(x), model(x)) for net in nets)
    assert vars(torch.autograd.Function)["apply"] is before


class Optional(nn.Module):
    """Further arguments with default values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, features=False, mask=None, *, scale=2.0, **more):
        x = torch.relu(self.linear(x))
        if mask is not None:
            x = x * mask
        return x if features or more or scale != 2 else x.sum(1)


def test_other_arguments_have_their_defaults() -> None:
    model, x = Optional(), torch.randn(4, 3)
    net = convert(model, x)
    assert torch.equal(net(x), model(x))
    with pytest.raises(TypeError, match="argument"):
        net(x, True)


def test_a_graph_that_gives_other_outputs_is_refused() -> None:
    class Types(nn.Module):
        def forward(self, x):
            return torch.relu(x) if isinstance(x, torch.Tensor) else torch.relu(x) + 1

    with pytest.raises(ConversionError, match=r"Types gives other outputs .*isinstance"):
        convert(Types(), torch.randn(2, 3))


def test_the_meta_device_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"example_input must be a batch .* values"):
        convert(model, x.to("meta"))
    with pytest.raises(ValueError, match=r"Sequential is on the meta device, .*to_empty"):
        convert(model.to("meta"), x)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda x: x.clamp(0, 1), r"its nonlinear operations are clamp: 3 .* clamp\(min=0\)"),
        (lambda x: x.clamp(min=-1), r"its nonlinear operations are clamp: 3"),
        (F.gelu, r"its nonlinear operations are gelu: 3 elements"),
    ],
)
def test_a_net_without_relus_is_told_what_it_has(act, words) -> None:
    class Act(nn.Module):
        def forward(self, x):
            return act(x)

    with pytest.raises(ConversionError, match="no ReLU to mask; " + words):
        convert(Act(), torch.randn(2, 3))


class Plain(nn.Module):
    """Attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes, self.config, self._private = 5, {"widths": (4, [4.0, "x"])}, 3
        self.fc, self.act = nn.Linear(3, 5), nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x))


def test_public_attributes_of_the_model_are_kept() -> None:
    original = convert(Plain(), torch.randn(2, 3))
    copies = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    for net in (original, *copies):
        assert (net.num_classes, net.config) == (5, {"widths": (4, [4.0, "x"])})
        assert not hasattr(net, "_private")
        assert not hasattr(net, "arch")


def test_errors_in_the_net_print_nothing(capfd) -> None:
    net = convert(Net(lambda net, x, y: y + x[:, :1]), torch.randn(2, 3, 8, 8))
    with pytest.raises(TypeError):
        net("no tensor")
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 4, 8, 8))
    assert capfd.readouterr().err == ""
