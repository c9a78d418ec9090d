"""autorep: DaPa, hysteresis, the published training, which units are kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import MaskedPoly, MaskedReLU
from fastbcd.masking.fitted import to_poly
from fastbcd.masking.twin import twin
from fastbcd.starts import autorep as module
from fastbcd.starts.autorep import AutoRepSettings, IndicatorPoly, autorep, count_on, dapa
from fastbcd.training.settings import Finetune
from helpers.nets import images, make, thinned
from helpers.start_cases import NONE, data, made, same, state

pytestmark = pytest.mark.filterwarnings(
    "ignore:after . epochs .*more than the budget:RuntimeWarning"
)
QUICK = {"epochs": 6, "lr": 0.1, "penalty": 20.0, "batch_size": 32, "finetune": NONE}


# ------------------------------------------------------------------------------------- DaPa


@pytest.mark.parametrize(("u", "s"), [(0.0, 1.0), (0.7, 0.3), (-1.5, 2.0), (3.0, 0.5)])
def test_dapa_is_the_least_squares_quadratic(u, s) -> None:
    """Against a weighted least-squares fit on a fine grid."""
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    x, root = u + s * z, torch.exp(-z * z / 4)
    powers = torch.stack([x**0, x, x * x], 1) * root[:, None]
    fit = torch.linalg.lstsq(powers, (torch.relu(x) * root)[:, None]).solution.flatten()
    found = dapa(torch.tensor([u], dtype=torch.float64), torch.tensor([s * s], dtype=torch.float64))
    torch.testing.assert_close(found.flatten(), fit, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------- the parts


def test_hysteresis() -> None:
    """m ← m·[aux > -thr] + (1-m)·[aux > thr]; a removed unit stays removed."""
    poly = MaskedPoly(6)
    poly.mask[4:] = False
    act = IndicatorPoly(poly, torch.tensor([0.002, -0.002, -0.004, 0.5, 0.5, -0.5]))
    act.follow(0.003)
    assert act.mask.tolist() == [True, True, False, True, False, False]
    edge = float(torch.tensor(0.003))
    steps = ((0.002, False), (edge, False), (0.004, True), (-0.002, True), (-edge, False))
    for aux, expected in steps:
        with torch.no_grad():
            act.aux[2] = aux
        act.follow(edge)
        assert act.mask[2].item() is expected
    assert poly.mask.tolist() == [True] * 4 + [False] * 2


def test_the_gradient_of_the_density_goes_straight_through() -> None:
    act = IndicatorPoly(MaskedPoly((2, 3)), torch.randn(2, 3))
    act.follow(0.003)
    count = count_on(act)
    assert count.item() == act.mask.sum().item()
    (grad,) = torch.autograd.grad(5 * count, [act.aux])
    torch.testing.assert_close(grad, 5 * F.softplus(act.aux))


def test_to_poly_computes_the_same() -> None:
    for net in (thinned(make("resnet")), make("poly"), make("mixture")):
        poly, x = to_poly(net), images(6)[0]
        torch.testing.assert_close(poly(x), net(x))
        assert fastbcd.masks(poly) == fastbcd.masks(net)
        kinds = {type(m) for m in poly.modules()}
        assert MaskedPoly in kinds
        assert MaskedReLU not in kinds
        theirs = {k: v for k, v in poly.state_dict().items() if not k.endswith("coef")}
        mine = {k: v for k, v in net.state_dict().items() if not k.endswith("coef")}
        assert theirs.keys() == mine.keys()
        assert all(torch.equal(theirs[k], mine[k]) for k in mine)


# ------------------------------------------------------------------ the published algorithm


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, aux, mask):
        ctx.save_for_backward(aux)
        return mask.clone()

    @staticmethod
    def backward(ctx, grad):
        return F.softplus(*ctx.saved_tensors) * grad, None


class PublishedPoly(nn.Module):
    """AutoReP's activation as published: its mask follows aux in every forward."""

    def __init__(self, act: IndicatorPoly, coef: torch.Tensor, scale_x2: float) -> None:
        super().__init__()
        self.scale_x2 = scale_x2
        self.aux = nn.Parameter(act.aux.detach().clone().contiguous())
        self.coef = nn.Parameter(coef.clone())
        self.register_buffer("bits", act.mask.float().contiguous())

    def forward(self, x):
        with torch.no_grad():
            on, off = (self.aux > -0.003).float(), (self.aux > 0.003).float()
            self.bits.copy_(self.bits * on + (1 - self.bits) * off)
        m = Through.apply(self.aux, self.bits)
        c0, c1, c2 = (c.reshape(-1, *(1,) * (x.ndim - 2)) for c in self.coef)
        return m * F.relu(x) + (1 - m) * (self.scale_x2 * c2 * x**2 + c1 * x + c0)


def statistics(net: nn.Module, train, batch_size: int) -> dict[str, list[torch.Tensor]]:
    """Mean and variance of what comes into each site, averaged over batches."""
    found: dict[str, list] = {}
    for name, act in net.named_modules():
        if isinstance(act, MaskedPoly):
            act.register_forward_pre_hook(
                lambda m, x, name=name: found.setdefault(name, []).append(
                    torch.var_mean(x[0], [d for d in range(x[0].ndim) if d != 1], correction=0)
                )
            )
    with torch.no_grad():
        for x, _ in train.batches(batch_size):
            net(x)
    return {n: [torch.stack(v).mean(0) for v in zip(*s, strict=True)] for n, s in found.items()}


@pytest.mark.parametrize("scale_x2", [0.1, 1.0])
def test_the_training_is_the_published_one(monkeypatch, scale_x2) -> None:
    """Weights, quadratics and bits of a plain re-statement, up to rounding."""
    monkeypatch.setattr(module, "REFRESH", 0)
    net, train = make("poly"), data()
    epochs, lr, budget, lam = 4, 0.05, 120, 30.0
    student, total = copy.deepcopy(net), fastbcd.masks(net).total
    measured = statistics(copy.deepcopy(net), train, 48)
    teacher = copy.deepcopy(net).eval()
    generator = torch.Generator().manual_seed(0)
    gates = twin(net, lambda a: IndicatorPoly(a, torch.rand(a.mask.shape, generator=generator)))
    for name, act in list(gates.named_modules()):
        if isinstance(act, IndicatorPoly):
            var, mean = measured[name]
            student.set_submodule(name, PublishedPoly(act, dapa(mean, var), scale_x2))
    sites = {n: m for n, m in student.named_modules() if isinstance(m, PublishedPoly)}
    optimizer = torch.optim.Adam(student.parameters(), lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=0.02)
    for epoch in range(epochs):
        student.train()
        for x, labels, _, _ in train.train_batches(48, seed=0, step=0, epoch=epoch, padding=1):
            s = student(x)
            density = sum(Through.apply(m.aux, m.bits).sum() for m in sites.values()) / total
            t = teacher(x).detach()
            kd = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
            loss = F.cross_entropy(s, labels) + kd + lam * F.relu(density - budget / total)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    found = {}
    decide = module.Replacement.decide

    def noted(self):
        found.update({n: m for n, m in self.model.named_modules() if hasattr(m, "aux")})
        return decide(self)

    monkeypatch.setattr(module.Replacement, "decide", noted)
    start = autorep(
        net, train, budget, epochs=epochs, lr=lr, lr_end=0.02, penalty=lam, batch_size=48,
        scale_x2=scale_x2, finetune=NONE,
    )  # fmt: skip
    assert start.model is net
    for name, act in sites.items():
        torch.testing.assert_close(found[name].coef, act.coef, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[name].aux, act.aux, rtol=1e-3, atol=1e-3)
        scale = torch.tensor([[1.0], [1.0], [scale_x2]])
        coef = net.get_submodule(name).coef
        torch.testing.assert_close(coef, scale * act.coef, rtol=1e-3, atol=1e-3)
        act(torch.zeros(1, *act.aux.shape))  # its bits follow aux at the next forward
        assert int((found[name].mask != act.bits.bool()).sum()) <= 2
    noise = ("0.bias", "running_mean", "num_batches_tracked", "bits", "aux", "coef")
    for key, value in student.state_dict().items():
        if not key.endswith(noise):
            torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-3, atol=1e-3)
    counts = [r.count for r in start.history]
    assert min(counts) < total


def test_quadratics_follow_the_statistics_at_first(monkeypatch) -> None:
    """Refreshed every few iterations while there are statistics, trained afterwards."""
    seen = []
    refresh = module.Replacement._refresh
    monkeypatch.setattr(module.Replacement, "_refresh", lambda s: seen.append(refresh(s)))
    monkeypatch.setattr(module, "REFRESH", 5)
    monkeypatch.setattr(module, "EVERY", 2)
    autorep(make("resnet"), data(), 300, **QUICK)
    assert len(seen) == 1 + 2  # the calibration; iterations 2 and 4


# ---------------------------------------------------------------------------------- results


def test_an_identity_net_becomes_a_polynomial_one() -> None:
    net = make("resnet")
    before = state(net)
    found = autorep(net, data(32), 300, **QUICK)
    assert same(state(net), before)
    assert found.model is not net
    assert {type(m) for m in found.model.modules()} & {MaskedReLU, IndicatorPoly} == set()


def test_a_training_that_stays_above_the_budget_warns() -> None:
    words = "after 1 epochs 50 ReLUs are on, more than the budget"
    with pytest.warns(RuntimeWarning, match=words):
        autorep(make("mlp"), data(32), 10, epochs=1, finetune=NONE)


def test_which_units_are_kept() -> None:
    """Those whose bit is on before those whose bit is off, by aux."""
    method = made(module.Replacement, AutoRepSettings(), to_poly(make("mlp")), 3)
    first = method.acts[0]
    with torch.no_grad():
        for act in method.acts:
            act.aux.fill_(-1)
        first.aux[:5] = torch.tensor([0.002, 0.5, 0.001, 0.002, 0.0029])
        first.mask.fill_(False)
        method.acts[1].mask.fill_(False)
        first.mask[[0, 2]] = True  # on, by hysteresis
    kept = method.decide().bits.nonzero().flatten().tolist()
    assert kept == [0, 1, 2]


@pytest.mark.parametrize(
    ("budget", "penalty"), [(6_000, 200.0), (6_001, 140.0), (15_000, 60.0), (15_001, 40.0)]
)
def test_the_published_penalty_of_a_budget(budget, penalty) -> None:
    net = fastbcd.models.resnet20(width=2, replacement="poly")
    assert made(module.Replacement, AutoRepSettings(), net, budget).penalty == penalty


def test_what_bcd_removes_never_comes_back() -> None:
    found = autorep(make("resnet"), data(48), 200, **QUICK)
    before = found.masks.bits.clone()
    tune = Finetune(epochs=1, lr=0.05, padding=1, batch_size=32)
    gone = torch.zeros_like(before)
    for step in fastbcd.steps(found.model, data(48), 180, drc=10, rt=2):
        gone |= before & ~fastbcd.masks(found.model).bits
        fastbcd.Finetuner(found.model, data(48), tune).run(step.number)
        assert not (fastbcd.masks(found.model).bits & gone).any()
    assert int(gone.sum()) == 20
