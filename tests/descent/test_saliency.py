"""saliency: its definition, finite differences, and whether it finds harmless removals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastbcd
from fastbcd import Finetune, MaskedPoly, MaskedReLU
from fastbcd.data.sources import as_data
from fastbcd.descent import saliency as saliencies
from fastbcd.masking import activations
from fastbcd.masking.masks import mask_modules
from fastbcd.ops.masked import saliency as saliency_op
from fastbcd.training.teacher import Distillation
from helpers.nets import images, make, thinned
from helpers.op_cases import Case, arguments

NETS = ["mlp", "resnet", "preactivation", "dense", "sizes", "line", "poly", "mixture"]
KINDS = pytest.mark.parametrize("kind", ["mean_abs", "abs_mean"])


@pytest.mark.parametrize("op", ["masked_relu", "masked_poly"])
def test_the_gradients_are_those_of_the_activation(op) -> None:
    given = arguments(Case(op, residual=True))
    anchor = torch.zeros((), requires_grad=True)
    coef = {"coef": given["coef"]} if op == "masked_poly" else {}
    totals = torch.zeros(given["mask"].shape, dtype=torch.float64)

    def graded(function, *rest, **small) -> list[Tensor]:
        x, residual = (given[n].clone().requires_grad_() for n in ("x", "residual"))
        y = function(x, given["mask"], *rest, residual=residual, **coef, **small)
        y.sin().sum().backward()
        return [y.detach(), x.grad, residual.grad]

    ours = graded(saliency_op, anchor, totals, absolute=False)
    true = graded(getattr(fastbcd.ops, op))
    assert all(torch.equal(a, b) for a, b in zip(ours, true, strict=True))
    assert anchor.grad is None


# ------------------------------------------------------------------------------ the definition


def restated(
    net: nn.Module, x: Tensor, labels: Tensor, kind: str, added_loss=lambda logits, i: 0.0
) -> Tensor:
    """The definition, one sample after the other through the net as it is, by hooks."""
    modules, found = list(mask_modules(net).values()), []
    for i, (image, label) in enumerate(zip(x, labels, strict=True)):
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

        def note(module, inputs, output, seen=seen) -> None:
            output.retain_grad()
            seen[module] = inputs[0].detach().clone(), output

        hooks = [m.register_forward_hook(note) for m in modules]
        with torch.enable_grad():
            # A new tensor for each activation, which in-place operations behind it then change.
            hooks += [m.register_forward_hook(lambda m, i, out: out.clone()) for m in modules]
            logits = net(image[None].requires_grad_())
            loss = F.cross_entropy(logits, label[None]) + added_loss(logits[0], i)
            loss.backward()
        for hook in hooks:
            hook.remove()
        net.zero_grad()
        t = []
        for module in modules:
            z, y = seen[module]
            added = z.clamp(max=0)
            if not isinstance(module, MaskedReLU):
                shape = -1, *(1,) * (z.ndim - 2)
                c0, c1, *c2 = (row.reshape(shape) for row in module.coef.detach())
                added = sum(c * z**2 for c in c2) + c1 * z + c0 - z.relu()
            t.append((y.grad * added)[0].flatten())
        found.append(torch.cat(t))
    t = torch.stack(found).double()
    kept = fastbcd.masks(net).bits
    if kind == "gain":
        return t.mean(0).masked_fill(kept, -math.inf)
    s = t.abs().mean(0) if kind == "mean_abs" else t.mean(0).abs()
    return s.masked_fill(~kept, math.inf)


@KINDS
@pytest.mark.parametrize("name", NETS)
def test_equals_the_definition(name, kind) -> None:
    net, (x, labels) = thinned(make(name)).double(), images(9)
    x = x.double()
    wanted = restated(net, x, labels, kind)
    for batch_size in (4, None):
        found = fastbcd.saliency(net, (x, labels), kind=kind, batch_size=batch_size)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    single = fastbcd.saliency(thinned(make(name)), (x.float(), labels), kind=kind)
    torch.testing.assert_close(single, wanted, rtol=1e-3, atol=1e-6)


@KINDS
@pytest.mark.parametrize("name", NETS)
def test_the_distillation_loss_is_added(name, kind) -> None:
    net, (x, labels) = thinned(make(name)).double(), images(9)
    x, teacher, settings = x.double(), make(name).double(), Finetune(temperature=3.0, distill=0.7)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(1.3)
    given = Distillation.of(teacher, as_data((x, labels)), settings)
    target = torch.softmax(teacher.eval()(x).detach().float().double() / 3.0, 1)

    def divergence(logits: Tensor, i: int) -> Tensor:
        logs = target[i].log() - torch.log_softmax(logits / 3.0, 0)
        return 0.7 * 9.0 * (target[i] * logs).sum()

    wanted = restated(net, x, labels, kind, divergence)
    plain = fastbcd.saliency(net, (x, labels), kind=kind)
    for batch_size in (4, None):
        found = fastbcd.saliency(net, (x, labels), kind=kind, batch_size=batch_size, distill=given)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(found, plain)


@pytest.mark.parametrize("name", NETS)
def test_gains_equal_the_definition(name) -> None:
    net, (x, labels) = thinned(make(name)).double(), images(9)
    found = saliencies.gains(net, (x.double(), labels))
    assert found.isfinite().any()
    wanted = restated(net, x.double(), labels, "gain")
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Untraceable runs as it is:RuntimeWarning")
@KINDS
def test_a_net_that_cannot_be_traced(kind) -> None:
    net, (x, labels) = thinned(make("untraceable")).double(), images(9)
    found = fastbcd.saliency(net, (x.double(), labels), kind=kind)
    torch.testing.assert_close(found, restated(net, x.double(), labels, kind))


class Overwrites(nn.Module):
    """An activation's input is changed in place behind it, which training does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.head = nn.Linear(192, 6), MaskedReLU(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x.flatten(1))
        y = self.act(z)
        z += 1
        return self.head(y + z if bool(y.sum() > -1) else y)


@pytest.mark.filterwarnings("ignore:Overwrites runs as it is:RuntimeWarning")
def test_an_input_that_is_changed_in_place_later() -> None:
    torch.manual_seed(0)
    net, (x, labels) = Overwrites().double().eval(), images(5)
    found = fastbcd.saliency(net, (x.double(), labels))
    torch.testing.assert_close(found, restated(net, x.double(), labels, "mean_abs"))


def inputs_of(net: nn.Module, x: Tensor) -> Tensor:
    """What every unit is given, [N, total]."""
    seen: list[Tensor] = []
    modules = mask_modules(net).values()
    hooks = [m.register_forward_hook(lambda m, i, o: seen.append(i[0].clone())) for m in modules]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return torch.cat([z.flatten(1) for z in seen], 1)


@pytest.mark.parametrize("name", ["mlp", "resnet", "poly"])
def test_equals_finite_differences_of_the_loss(name) -> None:
    """Where z is a little below 0 a removal changes the loss of its sample by t."""
    net, (x, labels) = make(name).double(), images(400)
    x, masks = x.double(), fastbcd.masks(net)
    with torch.no_grad():  # polynomials that differ little from ReLU where z is small
        for module in mask_modules(net).values():
            if isinstance(module, MaskedPoly):
                module.coef.copy_(torch.tensor([1e-5, 1.0, 0.1])[:, None].expand(module.coef.shape))
    z = inputs_of(net, x)
    places = ((z < -1e-4) & (z > -1e-3)).nonzero()
    full = fastbcd.MaskSet(masks.sites, masks.bits)
    compared = 0
    for sample, flat in places[:: max(1, len(places) // 12)].tolist():
        one = x[sample : sample + 1], labels[sample : sample + 1]
        with torch.no_grad():
            before = F.cross_entropy(net(one[0]), one[1])
            fastbcd.set_masks(net, full.without([flat]))
            change = float(F.cross_entropy(net(one[0]), one[1]) - before)
            fastbcd.set_masks(net, full)
        found = fastbcd.saliency(net, one)[flat].item()
        assert found == pytest.approx(abs(change), rel=0.02, abs=1e-12), (sample, flat)
        compared += abs(change) > 1e-9
    assert compared >= 4


# ---------------------------------------------------------------------------------- a trained net


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, fastbcd.ImageData]:
    """A few seconds of training on the embedded images."""
    torch.manual_seed(0)
    data = fastbcd.load("fashion-mnist-mini").first(1000)
    net = fastbcd.models.resnet20(image_size=28, in_channels=1, width=4, blocks=1)
    fastbcd.train(net, data, epochs=4, lr=0.1, batch_size=50, padding=0)
    return net.eval(), data.first(500)


@KINDS
def test_finds_harmless_removals_in_a_trained_net(trained, kind) -> None:
    net, data = trained
    masks = fastbcd.masks(net)
    size = masks.total // 5
    order = fastbcd.saliency(net, data, kind=kind).argsort()
    chance = [masks.sample(size, seed=0, step=0, trial=t) for t in range(8)]
    scores = fastbcd.score(net, [order[:size], order[-size:], *chance], data)
    lowest, highest, *others = (scores.loss - scores.base_loss).tolist()
    chances = sum(others) / len(others)
    assert chances > 0.01, "random removals do harm"
    assert lowest < 0.3 * chances
    assert highest > max(others)


def test_the_net_is_as_it_was(trained) -> None:
    net, data = trained
    before = {k: v.clone() for k, v in net.state_dict().items()}
    contents = {name: set(m.__dict__) for name, m in net.named_modules()}
    next(net.children()).train()
    with torch.no_grad():
        fastbcd.saliency(net, data.first(10))
    assert next(net.children()).training
    next(net.children()).eval()
    assert all(p.grad is None for p in net.parameters())
    assert {name: set(m.__dict__) for name, m in net.named_modules()} == contents
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_the_net_is_as_it_was_after_an_error(trained, monkeypatch) -> None:
    net, data = trained
    monkeypatch.setattr(activations, "saliency", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fastbcd.saliency(net, data.first(10))
    assert all("saliency_pass" not in m.__dict__ for m in net.modules())


def test_the_same_twice_and_in_any_batches(trained) -> None:
    net, data = trained
    first = fastbcd.saliency(net, data)
    assert torch.equal(first, fastbcd.saliency(net, data))
    torch.testing.assert_close(first, fastbcd.saliency(net, data, batch_size=33), rtol=1e-3,
                               atol=1e-9)  # fmt: skip


def test_ranks_share_the_batches_out(trained, monkeypatch) -> None:
    """The batches of all ranks together are those of one."""
    net, data = trained
    given = Distillation(torch.randn(len(data), 10))
    whole, parts = fastbcd.saliency(net, data, batch_size=64, distill=given), []
    monkeypatch.setattr(saliencies, "world", lambda: 3)
    for r in range(3):
        monkeypatch.setattr(saliencies, "rank", lambda r=r: r)
        parts.append(fastbcd.saliency(net, data, batch_size=64, distill=given))
    kept = fastbcd.masks(net).bits
    assert all(part[kept].any() for part in parts)
    torch.testing.assert_close(sum(parts)[kept], whole[kept], rtol=1e-12, atol=0)


def test_bad_input(trained) -> None:
    net, data = trained
    with pytest.raises(ValueError, match=r"kind='max'; choose from mean_abs, abs_mean"):
        fastbcd.saliency(net, data, kind="max")
    with pytest.raises(ValueError, match="batch_size=0"):
        fastbcd.saliency(net, data, batch_size=0)
    with pytest.raises(ValueError, match="no masked activations"):
        fastbcd.saliency(nn.Linear(3, 3), data)
    with pytest.raises(ValueError, match="logits for 3 images; there are 500"):
        fastbcd.saliency(net, data, distill=Distillation(torch.zeros(3, 10)))
    net, (x, labels) = make("mlp"), images(4)
    x[2] = math.nan
    with pytest.raises(FloatingPointError, match=r"site '.*', position \(0,\), is not finite"):
        fastbcd.saliency(net, (x, labels))
