"""convert: every ReLU call found, nothing else changed."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fastbcd
from fastbcd import ConversionError, MaskedReLU, convert
from fastbcd.masking.activations import REPLACEMENTS
from fastbcd.masking.conversion_report import comparisons_of
from helpers.nets import randomize

LARGE = ("resnet50", "wide_resnet50_2", "vgg11_bn", "shufflenet_v2_x0_5", "mnasnet0_5")
TORCHVISION = ["resnet18", "densenet121", "googlenet", "regnet_y_400mf"] + [
    pytest.param(name, marks=pytest.mark.long) for name in LARGE
]


RELUS = (F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_)


class Counter(torch.overrides.TorchFunctionMode):
    """Counts ReLU calls in a real forward pass, independently of fx, with their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in RELUS:
            self.shapes.append(tuple((args[0] if args else kwargs["input"]).shape[1:]))
        return func(*args, **(kwargs or {}))


def relu_shapes(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    with torch.no_grad(), Counter() as counter:
        model(x)
    return counter.shapes


def identity_twin(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The logits of the model with every ReLU call replaced by the identity."""

    class NoReLU(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in RELUS:
                return args[0] if args else kwargs["input"]
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), NoReLU():
        return model(x)


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name, torchvision, device) -> None:
    kwargs = {"init_weights": False} if name == "googlenet" else {}
    model = randomize(getattr(torchvision.models, name)(weights=None, num_classes=10, **kwargs))
    model = model.eval().to(device)
    x = torch.randn(2, 3, 64, 64, device=device)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        logits = model(x.clone())
        net = convert(model, x)
        masks = fastbcd.masks(net)
        assert [s.shape for s in masks.sites] == relu_shapes(model, x.clone())
        assert masks.count() == masks.total
        assert torch.equal(net(x), logits)
        fastbcd.set_masks(net, masks.without(masks.bits.nonzero().flatten()))
        assert masks.count() == 0
        torch.testing.assert_close(net(x), identity_twin(model, x.clone()), rtol=1e-5, atol=1e-5)
    # The model is untouched; the weights keep their keys and their order.
    assert [k for k in net.state_dict() if not k.endswith("mask")] == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(isinstance(m, MaskedReLU) for m in model.modules())
    assert all(not m.training for m in model.modules())
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in net.parameters()}
    assert not shared


def test_site_names_of_resnet18(torchvision) -> None:
    net = convert(torchvision.models.resnet18(weights=None), torch.randn(1, 3, 32, 32))
    names = [s.name for s in fastbcd.masks(net).sites]
    assert names[:5] == [
        "relu",
        "layer1.0.relu",
        "layer1.0.relu_2",
        "layer1.1.relu",
        "layer1.1.relu_2",
    ]
    assert len(names) == 17


def test_relu6_is_refused_unless_skipped(torchvision) -> None:
    model = torchvision.models.mobilenet_v2(weights=None)
    with pytest.raises(ConversionError, match=r"'features.0.2' is a ReLU6.*skip="):
        convert(model, torch.randn(1, 3, 32, 32))
    with pytest.raises(ConversionError, match=r"no ReLU to mask besides .*ReLU6"):
        convert(model, torch.randn(1, 3, 32, 32), skip=[nn.ReLU6])
    model.classifier.append(nn.ReLU())
    net = convert(model, torch.randn(1, 3, 32, 32), skip=[nn.ReLU6])
    assert [s.name for s in fastbcd.masks(net).sites] == ["classifier.2"]
    functional = Functional(lambda x: F.relu6(torch.relu(x)))
    with pytest.raises(ConversionError, match="'relu6'"):
        convert(functional, torch.randn(1, 3))
    for skip in ("relu6", ["relu6"], nn.ReLU6, [nn.ReLU6], nn.Hardtanh):
        net = convert(functional, torch.randn(1, 3), skip=skip)
        assert [s.name for s in fastbcd.masks(net).sites] == ["relu"]


class Function(nn.Module):
    """A module around a function, for odd calls."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Functional(Function):
    """A function after a linear layer."""

    def __init__(self, function, features: int = 3) -> None:
        super().__init__(function)
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return self.function(self.linear(x))


class Mixed(nn.Module):
    """nn.ReLU twice, F.relu, torch.relu, x.relu, x.relu_ and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.act(self.bn(self.conv(x)))
        x = F.relu(x - 0.1)
        x = x + F.relu(input=x - 0.3, inplace=False)
        x = torch.relu(0.4 - x)
        x = (x - 0.1).relu()
        y = x - 0.2
        y.relu_()
        y = self.act(y - 0.05)
        y = F.dropout(y, 0.5, self.training)
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize("replacement", ["identity", "line", "poly"])
def test_mixed_calls(replacement, device) -> None:
    model = randomize(Mixed()).eval().to(device)
    x = torch.randn(4, 3, 6, 6, device=device)
    net = convert(model, x, replacement=replacement)
    masks = fastbcd.masks(net)
    assert [s.shape for s in masks.sites] == relu_shapes(model, x)
    assert len({s.name for s in masks.sites}) == 7
    assert torch.equal(net(x), model(x))
    kind = REPLACEMENTS[replacement]
    assert sum(type(m) is kind for m in net.modules()) == 7
    if replacement == "identity":
        fastbcd.set_masks(net, masks.without(range(masks.total)))
        torch.testing.assert_close(net(x), identity_twin(model, x))


def test_one_bit_is_one_neuron() -> None:
    model = randomize(Mixed()).eval()
    x = torch.randn(8, 3, 6, 6)
    net = convert(model, x)
    masks = fastbcd.masks(net)
    site = masks.sites[2]
    seen = {}
    module = dict(net.named_modules())[site.name]
    module.register_forward_hook(lambda m, args, out: seen.update(z=args[0], y=out))
    fastbcd.set_masks(net, masks.without([site.start + 17]))
    net(x)
    changed = (seen["y"] != torch.relu(seen["z"])).flatten(1).any(0)
    assert changed.nonzero().flatten().tolist() == [17]


def test_in_place_relu_whose_input_is_used_again(device) -> None:
    def function(x):
        y = F.relu(x, inplace=True)
        return x * 2 + y

    model = Functional(function).to(device)
    x = torch.randn(5, 3, device=device)
    net = convert(model, x)
    assert torch.equal(net(x), model(x))


def test_in_place_relu_through_a_view_is_refused() -> None:
    def function(x):
        y = x[:, :2]
        y.relu_()
        return x

    model = Functional(function)
    nn.init.constant_(model.linear.bias, -10)
    with pytest.raises(ConversionError, match="in-place ReLU changes a tensor"):
        convert(model, torch.ones(5, 3))


def test_sequential_mlp(device) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2))
    model.to(device)
    x = torch.randn(3, 5, device=device)
    net = convert(model, x)
    assert [tuple(s) for s in fastbcd.masks(net).sites] == [("1", (7,), 0), ("3", (6,), 7)]
    assert torch.equal(net(x), model(x))


def test_a_module_called_twice_gets_two_sites() -> None:
    relu, linear = nn.ReLU(), nn.Linear(4, 4)
    model = nn.Sequential(linear, relu, linear, relu)
    net = convert(model, torch.randn(2, 4))
    assert fastbcd.masks(net).total == 8
    assert torch.equal(net(torch.ones(2, 4)), model(torch.ones(2, 4)))
    with torch.no_grad():
        net.get_parameter("0.weight").zero_()
    assert net.get_submodule("2") is net.get_submodule("0"), "shared weights stay shared"


def test_sites_are_in_the_order_of_execution_not_of_registration() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.ReLU(), nn.ReLU()
            self.wide, self.narrow = nn.Linear(3, 2), nn.Linear(2, 3)

        def forward(self, x):
            return self.last(self.wide(self.first(self.narrow(x))))

    net = convert(Backwards(), torch.randn(4, 2))
    assert fastbcd.masks(net).counts() == {"first": 3, "last": 2}
    fastbcd.set_masks(net, fastbcd.masks(net).without([0, 4]))
    assert net.first.mask.tolist() == [False, True, True]
    assert net.last.mask.tolist() == [True, False]


@pytest.mark.parametrize("replacement", ["line", "poly"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_coefficients_have_the_dtype_of_the_net(replacement, dtype) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(dtype), torch.randn(5, 3).to(dtype)
    net = convert(model, x, replacement=replacement)
    assert net.get_submodule("1").coef.dtype == dtype
    fastbcd.set_masks(net, fastbcd.masks(net).without([0]))
    assert net(x).dtype == dtype


class Pooled(nn.Module):
    """Two max-pools, one a module and one a call, or their averages."""

    def __init__(self, average=False) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(16, 5)
        kind = nn.AvgPool2d if average else nn.MaxPool2d
        self.pool = kind(3, 2, 1, **({"count_include_pad": False} if average else {}))
        self.average = average

    def forward(self, x):
        x = self.pool(torch.relu(self.conv(x)))
        if self.average:
            return self.out(F.avg_pool2d(x, 2, ceil_mode=True).flatten(1))
        return self.out(F.max_pool2d(x, kernel_size=2, ceil_mode=True).flatten(1))


def test_average_pools_replace_max_pools() -> None:
    model, average, x = Pooled().eval(), Pooled(average=True).eval(), torch.randn(6, 3, 7, 7)
    average.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="first is pool"):
        assert convert(model, x).conversion_report.comparisons == 64 * 8 + 16 * 3
    net = convert(model, x, maxpool="average")
    assert net.conversion_report.nonlinear == ()
    torch.testing.assert_close(net(x), average(x))
    scores = [fastbcd.score(net, [[0, 9]], (x, torch.arange(6) % 5), engine=engine).loss
              for engine in ("sequential", "stacked", "collapsed")]  # fmt: skip
    torch.testing.assert_close(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[2])
    for pool in (
        nn.AdaptiveMaxPool2d((1, 2)),
        Function(lambda y: F.adaptive_max_pool2d(y, (1, 2))),
    ):
        net = convert(nn.Sequential(nn.ReLU(), pool), x, maxpool="average")
        torch.testing.assert_close(net(x), F.adaptive_avg_pool2d(x.relu(), (1, 2)))
    for bad in (nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, return_indices=True)):
        with pytest.raises(ConversionError, match="'1' has a dilation or returns indices"):
            convert(nn.Sequential(nn.ReLU(), bad), x, maxpool="average")
    with pytest.raises(ValueError, match="maxpool='mean'; choose from keep, average"):
        convert(model, x, maxpool="mean")


def test_relu6_becomes_relu(torchvision) -> None:
    """MobileNetV2, against itself with other modules; the names of modules are kept."""
    model, x = torchvision.models.mobilenet_v2(weights=None).eval(), torch.randn(2, 3, 32, 32)
    net = convert(model, x, relu6="relu")
    twin = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU6):
            twin.set_submodule(name, nn.ReLU())
    assert torch.equal(net(x), twin(x))
    assert [s.name for s in fastbcd.masks(net).sites] == [
        name for name, module in model.named_modules() if isinstance(module, nn.ReLU6)
    ]
    assert net.conversion_report.nonlinear == ()
    assert len(net.conversion_report.exchanged) == 35
    assert "35 calls were exchanged: fine-tune the net" in str(net.conversion_report)
    net = convert(model, x, relu6="relu", skip=["features.0.*", "features.1.*"])
    kept = {op.name: op.comparisons for op in net.conversion_report.nonlinear}
    assert kept == {"features.0.2": 2 * 32 * 16 * 16, "features.1.conv.0.2": 2 * 32 * 16 * 16}
    with pytest.raises(ValueError, match="relu6='yes'; choose from keep, relu"):
        convert(model, x, relu6="yes")


@pytest.mark.parametrize("name", ["silu", "gelu", "hardswish", "mish"])
def test_smooth_activations_become_relu(name) -> None:
    """Called as a module, as a function, in place, twice in succession."""
    smooth = getattr(F, name)
    kind = {"silu": nn.SiLU, "gelu": nn.GELU, "hardswish": nn.Hardswish, "mish": nn.Mish}[name]

    def model_of(module, function):
        return nn.Sequential(nn.Linear(3, 3), module, Functional(lambda x: function(function(x))))

    x = torch.randn(5, 3)
    model, rectified = model_of(kind(), smooth), model_of(nn.ReLU(), F.relu)
    rectified.load_state_dict(model.state_dict())
    with pytest.raises(ConversionError, match=r"no ReLU to mask.*smooth='relu'.*skip="):
        convert(model, x)
    net = convert(model, x, smooth="relu")
    assert torch.equal(net(x), rectified(x))
    assert fastbcd.masks(net).counts() == {"1": 3, f"2.{name}": 3, f"2.{name}_2": 3}
    net = convert(model, x, smooth="relu", skip="1")
    assert [op.name for op in net.conversion_report.nonlinear] == ["1"]
    assert torch.equal(net(x), nn.Sequential(*model[:2], rectified[2])(x))


def test_other_tracers_see_masked_activations(torchvision) -> None:
    """torch.fx with its own tracer, and the feature extractors of torchvision."""
    model, x = torchvision.models.resnet18(weights=None).eval(), torch.randn(2, 3, 32, 32)
    by_hand = nn.Sequential(nn.Conv2d(3, 4, 3), fastbcd.MaskedLine((4, 30, 30))).eval()
    net = convert(model, x, maxpool="average")
    for one in (net, by_hand):
        assert torch.equal(torch.fx.symbolic_trace(one)(x), one(x))
    extraction = importlib.import_module("torchvision.models.feature_extraction")
    features = extraction.create_feature_extractor(
        net, {"layer1.0.relu": "early", "layer4.1.relu_1": "late"}
    )(x)
    assert features["early"].shape == (2, 64, 8, 8)
    assert torch.equal(net.fc(net.avgpool(features["late"]).flatten(1)), net(x))


def test_train_mode_follows(device) -> None:
    model = randomize(Mixed()).to(device)
    model.bn.eval()  # a frozen batch norm stays frozen
    net = convert(model, torch.randn(4, 3, 6, 6, device=device))
    assert net.training
    assert not net.bn.training
    x = torch.randn(4, 3, 6, 6, device=device)
    assert not torch.equal(net(x), net(x)), "dropout is on in train mode"
    net.eval()
    assert torch.equal(net(x), net(x))
    net.train()
    net.bn.train()
    before = net.bn.running_mean.clone()
    net(x)
    assert not torch.equal(net.bn.running_mean, before)


@pytest.mark.parametrize(
    "dropout",
    [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout],
)
def test_functional_dropout_follows_train_mode(dropout) -> None:
    class Net(nn.Module):
        def forward(self, x):
            return dropout(torch.relu(x), 0.5, training=self.training)

    images = {F.dropout2d: (8, 4, 3, 3), F.dropout3d: (8, 4, 3, 3, 3)}
    x = torch.randn(images.get(dropout, (8, 16, 9)))
    net = convert(Net(), x)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), torch.relu(x))


def test_functional_dropout_that_is_always_on_stays_on() -> None:
    x = torch.randn(8, 64)
    net = convert(Functional(lambda y: F.dropout(torch.relu(y), 0.5), 64), x).eval()
    assert not torch.equal(net(x), net(x))


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation, as timm writes it."""

    def __init__(self, channels: int, **options) -> None:
        super().__init__(channels, **options)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
        training = self.training or self.running_mean is None
        return self.act(
            F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, training,
                momentum, self.eps,
            )
        )  # fmt: skip


class DropPath(nn.Module):
    """Stochastic depth, as timm writes it."""

    def forward(self, x):
        if not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(0.5).div_(0.5)


class Keyword(nn.Module):
    """F.batch_norm on buffers of another module's names, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return F.relu(F.batch_norm(x, self.mean, training=self.training, running_var=self.var))


@pytest.mark.parametrize("norm", [lambda: NormAct(4), Keyword])
def test_functional_batch_norm_follows_train_mode(norm, device) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm(), nn.Conv2d(4, 4, 3), norm()).to(device)
    x = torch.randn(4, 3, 8, 8, device=device)
    net = convert(model, x)
    assert [k for k in net.state_dict() if not k.endswith("mask")] == list(model.state_dict())
    for training in (True, True, False):
        for m in (model, net):
            m.train(training)
        assert torch.equal(net(x), model(x))
    changed = net.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(changed[name], value) or name.endswith("num_batches_tracked"), name
    again = convert(convert(model, x, skip=["3.*"]), x)
    loaded = pickle.loads(pickle.dumps(again))
    assert torch.equal(again.train()(x), model.train()(x))
    assert torch.equal(loaded.train()(x), model(x))
    again(x)
    assert torch.equal(again.eval()(x), model.eval()(x))
    frozen = copy.deepcopy(model)
    frozen[1].eval()
    net = convert(frozen, x)
    assert torch.equal(net(x), frozen(x)), "a frozen batch norm stays frozen"


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_engines_score_nets_that_follow_train_mode(engine) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), NormAct(4), DropPath(), nn.Conv2d(4, 4, 3), Keyword(), nn.Flatten(),
        nn.Linear(64, 5),
    )  # fmt: skip
    data = torch.randn(40, 3, 8, 8), torch.randint(0, 5, (40,))
    net = convert(randomize(model).eval(), data[0][:2])
    ids = [list(range(i, i + 9)) for i in range(0, 45, 9)]
    truth = fastbcd.score(net, ids, data, engine="sequential")
    found = fastbcd.score(net, ids, data, engine=engine)
    assert found.correct.tolist() == truth.correct.tolist()
    torch.testing.assert_close(found.loss, truth.loss)


def test_stochastic_depth_follows_train_mode(torchvision) -> None:
    depths = DropPath(), torchvision.ops.StochasticDepth(0.5, "row")
    for depth in depths:
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), depth, nn.Linear(3, 2))
        x = torch.randn(64, 3)
        net = convert(model, x)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(net(x), expected)
        assert not torch.equal(net(x), net.eval()(x))
        assert torch.equal(net(x), model.eval()(x))


class Auxiliary(nn.Module):
    """A second head in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        x = torch.relu(self.body(x))
        if self.training:
            return self.head(x), torch.relu(self.aux(x))
        return self.head(x)


def test_heads_of_training_are_left_out() -> None:
    model, x = Auxiliary(), torch.randn(2, 3)
    net = convert(model, x)
    assert torch.equal(net(x), model(x)[0])


class Depends(nn.Module):
    """A forward that depends on the mode in a way that the test gives."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.function(self, torch.relu(x))


def _counts(module, x):
    if module.training:
        module.seen.add_(1)
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x if m.training else torch.softmax(x, 1),
        lambda m, x: x + torch.randn_like(x) if m.training else x,
        lambda m, x: x * (0.5 if m.training else 1.0),
        lambda m, x: x.mul_(2) if m.training else x,
        lambda m, x: torch.relu(x - 1) if m.training else x,
        lambda m, x: F.dropout(x, 0.5 if m.training else 0.0),
        lambda m, x: x * torch.tensor(0.5 if m.training else 1.0),
        _counts,
    ],
)
def test_other_dependence_on_the_mode_is_refused_by_name(function) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Depends(function))
    with pytest.raises(
        ConversionError, match=r"'1' \(Depends\) computes relu .* training|'1.seen' in training"
    ):
        convert(model, torch.randn(2, 3))


def test_a_cumulative_functional_batch_norm_is_refused() -> None:
    with pytest.raises(
        ConversionError, match=r"'1' \(NormAct\) computes .* something else in training"
    ):
        convert(
            nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4, momentum=None)), torch.randn(2, 3, 5, 5)
        )


def test_tensors_made_in_forward_are_no_state() -> None:
    model, x = Functional(lambda y: torch.relu(y) + torch.ones(3)), torch.randn(2, 3)
    net = convert(model, x)
    assert torch.equal(net(x), model(x))
    assert list(net.state_dict()) == ["linear.weight", "linear.bias", "relu.mask"]


def test_gradients_equal_the_models() -> None:
    model = randomize(Mixed()).eval()
    x = torch.randn(4, 3, 6, 6)
    net = convert(model, x)
    for m in (model, net):
        m(x).square().sum().backward()
    for (name, p), (_, q) in zip(model.named_parameters(), net.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_wrappers_are_removed() -> None:
    model = randomize(Mixed()).eval()
    x = torch.randn(2, 3, 6, 6)
    plain = convert(model, x)
    wrappers = nn.DataParallel(model, device_ids=[]), torch.compile(model), AveragedModel(model)
    for wrapped in wrappers:
        net = convert(wrapped, x)
        assert list(net.state_dict()) == list(plain.state_dict())
        assert fastbcd.masks(net).sites == fastbcd.masks(plain).sites


def test_converting_a_converted_net_finds_what_is_left() -> None:
    model = randomize(Mixed()).eval()
    x = torch.randn(2, 3, 6, 6)
    net = convert(model, x, skip=["act"])
    again = convert(net, x)
    assert fastbcd.masks(again).total == 7 * 4 * 36
    assert fastbcd.masks(again).sites == fastbcd.masks(convert(model, x)).sites
    assert torch.equal(again(x), model(x))


def test_skip_by_name() -> None:
    model = randomize(Mixed()).eval()
    x = torch.randn(2, 3, 6, 6)
    for skip in ("act", ["act"], ("a*",)):
        net = convert(model, x, skip=skip)
        assert len(fastbcd.masks(net).sites) == 5
        assert torch.equal(net(x), model(x))


@pytest.mark.parametrize("name", ["akt", "layer4.*", "conv", "Mixed", ""])
def test_skip_refuses_names_that_no_relu_has(name) -> None:
    with pytest.raises(ConversionError, match=rf"skip={re.escape(repr(name))} .*no ReLU; .* act,"):
        convert(Mixed(), torch.randn(2, 3, 6, 6), skip=["relu", name])


@pytest.mark.parametrize("entry", [3, None, torch.relu, int])
def test_skip_refuses_what_is_neither_a_name_nor_a_module_type(entry) -> None:
    with pytest.raises(TypeError, match=r"skip has .*give names"):
        convert(Mixed(), torch.randn(2, 3, 6, 6), skip=[entry])


def test_deepcopy_and_compile_of_a_converted_net() -> None:
    model = randomize(Mixed()).eval()
    x = torch.randn(2, 3, 6, 6)
    net = convert(model, x)
    fastbcd.set_masks(net, fastbcd.masks(net).without(range(0, 500, 3)))
    twin = copy.deepcopy(net)
    assert fastbcd.masks(twin) == fastbcd.masks(net)
    assert torch.equal(twin(x), net(x))
    fastbcd.set_masks(twin, fastbcd.masks(twin).without([1]))
    assert fastbcd.masks(twin).count() == fastbcd.masks(net).count() - 1
    traced = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x), net(x))


@pytest.mark.long
def test_a_converted_net_compiles() -> None:
    net, x = convert(randomize(Mixed()).eval(), torch.randn(2, 3, 6, 6)), torch.randn(2, 3, 6, 6)
    fastbcd.set_masks(net, fastbcd.masks(net).without(range(0, 500, 3)))
    torch.testing.assert_close(torch.compile(net, fullgraph=True)(x), net(x))


# ------------------------------------------------------------------------------- bad input


class Branches(nn.Module):
    def forward(self, x):
        return torch.relu(x) if x.sum() > 0 else x


class Folds(nn.Module):
    def forward(self, x):
        return torch.relu(x.view(-1, 2)).view(x.shape[0], -1)


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (nn.Linear(3, 3), torch.randn(2, 3), "Linear has no ReLU to mask"),
        (Branches(), torch.randn(2, 3), r"cannot be traced.*test_convert.py:\d+.*MaskedReLU"),
        (Folds(), torch.randn(2, 6), r"'relu' sees a tensor of shape \(6, 2\) for a batch of 2"),
        (
            nn.Sequential(nn.ReLU(), nn.TransformerEncoderLayer(4, 2, batch_first=True)),
            torch.randn(2, 5, 4),
            r"not captured: '1' \(TransformerEncoderLayer\) computes relu",
        ),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 4), r"shape \(2, 4\)"),
    ],
    ids=["no relu", "untraceable", "folded batch", "hidden", "size"],
)
def test_refusals_name_the_place(model, x, words, capfd) -> None:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ConversionError, match=words):
        convert(model, x)
    assert capfd.readouterr().err == ""
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize(
    "relu",
    [
        lambda x: x.clamp(min=0),
        lambda x: torch.clamp(x, 0.0),
        lambda x: x.clamp_(0),
        lambda x: torch.clip(x, min=0, max=None),
        lambda x: torch.clamp_min(x, 0),
        lambda x: F.threshold(x, 0, 0),
        lambda x: F.threshold(x, 0, 0, True),
        nn.Threshold(0, 0, inplace=True),
    ],
)
def test_other_ways_to_write_a_relu(relu) -> None:
    model, x = Functional(lambda y: (z := y * 1, relu(z) + z)[1]), torch.randn(50, 3)
    if isinstance(relu, nn.Module):
        model = nn.Sequential(nn.Linear(3, 3), relu)
    net = convert(model, x)
    masks = fastbcd.masks(net)
    assert [s.shape for s in masks.sites] == [(3,)]
    assert torch.equal(net(x), model(x))
    assert net.conversion_report.nonlinear == ()
    fastbcd.set_masks(net, masks.without(range(3)))
    assert not torch.equal(net(x), model(x))


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.where(x > 0, x, 0), ("gt", "gt", 6)),
        (lambda x: x * (x > 0), ("gt", "gt", 6)),
        (lambda x: x * (x >= 0).float(), ("ge", "ge", 6)),
        (lambda x: x.masked_fill(x < 0, 0), ("lt", "lt", 6)),
        (lambda x: (x + x.abs()) / 2, ("abs", "abs", 6)),
        (lambda x: F.max_pool1d(x, 2), ("max_pool1d", "max_pool2d", 3)),
        (lambda x: torch.maximum(x, torch.ones_like(x)), ("maximum", "maximum", 6)),
        (lambda x: torch.maximum(x, x.flip(1)), ("maximum", "maximum", 6)),
        (lambda x: x.clamp(0, 1), ("clamp", "clamp", 6)),
        (lambda x: x * x, ("mul", "mul", 6)),
        (lambda x: torch.ones(6) / x, ("div", "div", 6)),
        (lambda x: x.amax(1, keepdim=True), ("amax", "amax", 1)),
        (lambda x: torch.softmax(x, 1), ("softmax", "softmax", 6)),
        (lambda x: torch.fft.rfft(x).abs(), ("abs", "abs", 4)),
        (
            lambda x: F.grid_sample(torch.ones(4, 1, 3, 3), x.view(4, 3, 1, 2), align_corners=True),
            ("grid_sample", "grid_sampler_2d", 3),
        ),
        (lambda x: F.layer_norm(x, (6,)), ("layer_norm", "native_layer_norm", 6)),
        (lambda x: F.prelu(x, torch.ones(1)), ("prelu", "prelu", 6)),
        (nn.LeakyReLU(), ("1.function", "leaky_relu", 6)),
        (nn.PReLU(), ("1.function", "prelu", 6)),
        (nn.GELU(), ("1.function", "gelu", 6)),
        (nn.Hardswish(), ("1.function", "hardswish", 6)),
        (nn.Sigmoid(), ("1.function", "sigmoid", 6)),
    ],
)
def test_nonlinear_operations_that_stay_are_reported(function, op) -> None:
    name = op[0] if op[0].startswith("1.") else f"1.{op[0]}"
    model = nn.Sequential(nn.ReLU(), Functional(function, 6)).eval()
    x = torch.randn(4, 6)
    with pytest.warns(UserWarning, match=f"^nonlinear .* 1, .*{name}.*conversion_report") as w:
        net = convert(model, x)
    assert len(w) == 1
    listed = net.conversion_report.nonlinear
    assert [(o.name, o.kind, o.elements) for o in listed] == [(name, *op[1:])]
    assert torch.equal(net(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skipped = convert(model, x, skip=name)  # no warning of what skip= names
    for twin in (copy.deepcopy(net), skipped):
        assert str(twin.conversion_report) == str(net.conversion_report)
        assert name in str(twin.conversion_report)
    assert str(pickle.loads(pickle.dumps(net.conversion_report))) == str(net.conversion_report)
    assert not any("report" in key for key in net.state_dict())
    listed = fastbcd.private.cost(net, activations_only=True)
    assert listed.not_included == net.conversion_report.nonlinear
    assert f"not included, besides linear layers:\n    {name}" in str(listed)
    assert listed.as_dict()["not_included"][0]["kind"] == op[1]


@pytest.mark.parametrize(
    ("function", "shape", "comparisons"),
    [
        (nn.MaxPool2d(3, 2, 1), (8, 8), 4 * 4 * 8),
        (nn.MaxPool2d(2, ceil_mode=True), (5, 5), 3 * 3 * 3),
        (nn.MaxPool2d((3, 1), 1), (5, 4), 3 * 4 * 2),
        (nn.AdaptiveMaxPool2d(2), (8, 8), 64 - 4),
        (lambda x: F.max_pool2d(x, 4, return_indices=True)[0], (8, 8), 4 * 15),
        (lambda x: x.amax((2, 3)), (8, 8), 63),
        (lambda x: x.max(3).values, (8, 8), 64 - 8),
        (lambda x: x.clamp(0, 1), (2, 2), 8),
        (lambda x: x.clamp(max=1), (2, 2), 4),
        (nn.LeakyReLU(), (2, 2), 4),
        (nn.Hardswish(), (2, 2), 8),
        (nn.GELU(), (2, 2), 0),
    ],
)
def test_comparisons_are_counted(function, shape, comparisons) -> None:
    model = nn.Sequential(nn.ReLU(), Function(function))
    with pytest.warns(UserWarning, match="nonlinear operations stay.*: 1,"):
        net = convert(model, torch.randn(3, 1, *shape))
    assert net.conversion_report.comparisons == comparisons
    assert comparisons_of(nn.Sequential(net, nn.Flatten())) == comparisons
    assert (f", with {comparisons} comparisons" in str(net.conversion_report)) == (comparisons > 0)
    (op,) = fastbcd.private.cost(net, activations_only=True).not_included
    assert op.comparisons == comparisons
    assert (f", {comparisons} comparisons per image" in str(op)) == (comparisons > 0)


def test_a_relu_of_a_relu() -> None:
    model = Functional(lambda y: F.threshold(F.relu(y).relu_(), 0, 0))
    x = torch.randn(50, 3)
    net = convert(model, x)
    assert [s.name for s in fastbcd.masks(net).sites] == ["relu", "relu_2", "threshold"]
    assert torch.equal(net(x), model(x))


def test_linear_operations_are_not_reported() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2), nn.ConstantPad2d(1, 0.0), nn.PixelShuffle(2),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        Functional(lambda x: torch.cat([x, -x], 1).mean(1, True) / 3 - x * torch.ones(9), 9),
    )  # fmt: skip
    net = convert(model, torch.randn(2, 3, 8, 8))
    assert net.conversion_report.nonlinear == ()
    assert str(net.conversion_report).startswith("144 ReLUs at 1 sites have masks; 0 other")


def test_a_relu_of_weights_is_no_activation() -> None:
    class Positive(nn.Linear):
        def forward(self, x):
            return F.relu(F.linear(x, torch.relu(self.weight), self.bias.clamp(min=0)))

    model, x = Positive(3, 3), torch.randn(4, 3)
    net = convert(model, x)
    assert [s.shape for s in fastbcd.masks(net).sites] == [(3,)]
    assert torch.equal(net(x), model(x))


def test_bad_arguments() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(ValueError, match=r"replacement='square'.*identity.*poly"):
        convert(model, torch.randn(2, 3), replacement="square")
    with pytest.raises(ValueError, match="example_input must be a batch"):
        convert(model, torch.randn(3))
    with pytest.raises(ValueError, match="example_input must be a batch"):
        convert(model, [1, 2])
    with pytest.raises(ConversionError, match="has masks already"):
        convert(convert(model, torch.randn(2, 3)), torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"the net is <class .*Mixed'>; give a module"):
        convert(Mixed, torch.randn(2, 3))


def test_public_signature() -> None:
    assert list(inspect.signature(convert).parameters)[:3] == [
        "model",
        "example_input",
        "replacement",
    ]
