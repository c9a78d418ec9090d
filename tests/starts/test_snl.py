"""snl: the published algorithm, which units are kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import MaskedReLU
from fastbcd.masking.twin import twin
from fastbcd.starts.snl import Selective, SnlSettings, SoftReLU, growth, snl
from fastbcd.training.loop import Trainer
from fastbcd.training.settings import Finetune
from helpers.nets import images, make, thinned
from helpers.start_cases import QUICK, SHORT, data, made, same, state

# ------------------------------------------------------------------ the published algorithm


class PublishedReLU(nn.Module):
    """SNL's activation, as its paper writes it."""

    def __init__(self, act: MaskedReLU) -> None:
        super().__init__()
        self.alphas = nn.Parameter(act.mask.float())
        self.order = act.order

    def forward(self, x):
        return self.alphas * F.relu(x) + (1 - self.alphas) * x


def published_snl(net, train, budget, *, lr, lambda0, kappa, threshold, batch_size, epochs):
    """SNL's mask phase in plain PyTorch; counts, λ of each epoch, the trained net's tensors."""
    teacher = copy.deepcopy(net).eval()
    student = copy.deepcopy(net)
    sites = {n: m for n, m in student.named_modules() if isinstance(m, MaskedReLU)}
    for name, act in sites.items():
        student.set_submodule(name, PublishedReLU(act))
    alphas = [m.alphas for m in student.modules() if isinstance(m, PublishedReLU)]
    optimizer = torch.optim.Adam(student.parameters(), lr)
    lam, counts, lambdas = lambda0, [], []
    lowest = sum(int((a > threshold).sum()) for a in alphas)
    for epoch in range(epochs):
        student.train()
        lambdas.append(lam)
        for x, labels, _, _ in train.train_batches(
            batch_size, seed=0, step=0, epoch=epoch, padding=SHORT.padding
        ):
            s = student(x)
            with torch.no_grad():
                t = teacher(x)
            kd = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
            loss = F.cross_entropy(s, labels) + kd + lam * sum(torch.norm(a, p=1) for a in alphas)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        counts.append(sum(int((a > threshold).sum()) for a in alphas))
        if counts[-1] < lowest:
            lowest = counts[-1]
        elif epoch >= 5:
            lam *= kappa
        if counts[-1] <= budget:
            break
    return counts, lambdas, student


@pytest.mark.parametrize("name", ["resnet", "mlp"])
def test_the_mask_training_is_the_published_one(name) -> None:
    """Same counts and λ, the same weights up to rounding, through several updates of λ."""
    net, train = make(name), data()
    settings = {"lr": 2e-3, "lambda0": 1e-3, "kappa": 3.0, "threshold": 0.97, "batch_size": 48}
    counts, lambdas, student = published_snl(net, train, 1, **settings, epochs=9)
    with pytest.warns(RuntimeWarning, match="more than the budget"):
        start = snl(net, train, 1, **settings, max_epochs=9, finetune=Finetune(epochs=0, padding=1))
    assert [r.notes["lambda"] for r in start.history] == lambdas
    assert max(lambdas) > lambdas[0]
    assert min(counts) < counts[0]
    for record, count in zip(start.history, counts, strict=True):
        assert abs(record.count - count) <= 2  # units at the threshold, by rounding
    # The gradient of a convolution's bias before a batch norm is rounding, which Adam amplifies.
    noise = ("0.bias", "running_mean") if name == "resnet" else ()
    for key, value in student.state_dict().items():
        if not key.endswith(("alphas", "num_batches_tracked", *noise)):
            torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-4, atol=1e-4)


def test_the_twin_computes_what_the_net_computes() -> None:
    net = thinned(make("resnet"))
    soft = twin(net, lambda act: SoftReLU(act.mask))
    x = images(8)[0]
    torch.testing.assert_close(soft(x), net(x))
    assert all(a is b for a, b in zip(net.parameters(), _weights(soft), strict=True))


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if not n.endswith("alpha")]


def test_fused_additions_train_alike() -> None:
    """The rewritten graph with act(a + b) in one call gives the twin's own gradients."""
    net, train = thinned(make("resnet")), data(32)
    soft = twin(net, lambda act: SoftReLU(act.mask))
    trainer = Trainer(soft, train, SHORT)
    assert any(n.op == "call_module" and len(n.args) == 2 for n in trainer.model.graph.nodes)
    x, labels = next(train.batches(16))
    grads = []
    for model in (soft, trainer.model):
        model.eval()
        loss = F.cross_entropy(model(x), labels)
        grads.append(torch.autograd.grad(loss, list(trainer.trained.values())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------- results


@pytest.mark.parametrize(("budget", "exact"), [(34, True), (12, True), (34, False)])
def test_exact_keeps_the_largest_numbers(budget, exact) -> None:
    """Also units under the threshold, if the training stopped below the budget."""
    method = made(Selective, SnlSettings(exact=exact), make("mlp"), budget)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for act in method.acts:
            act.alpha.copy_(torch.rand(act.alpha.shape, generator=g) - 0.5)
        method.acts[0].alpha[[7, 9]] = 0.3  # of equal numbers the first is kept
    values, chosen = method.values(), method.decide().bits
    order = sorted(range(50), key=lambda i: (-float(values[i]), i))
    if not exact:
        budget = int((values > 0.01).sum())
        assert budget < 34
    assert chosen.nonzero().flatten().tolist() == sorted(order[:budget])


def test_the_training_stops_at_the_budget_and_lambda_grows() -> None:
    total = fastbcd.masks(make("resnet")).count()
    found = snl(make("resnet"), data(), 300, **QUICK)
    counts = [r.count for r in found.history]
    assert counts[-1] <= 300 < min(counts[:-1])
    updates = [r.notes["lambda_updates"] for r in found.history]
    assert updates == [sum(growth(counts[: n + 1], lowest=total)) for n in range(len(counts))]
    as_published = snl(make("mlp"), data(), 30, **{**QUICK, "exact": False})
    assert as_published.masks.count() == as_published.history[-1].count <= 30


def test_too_few_epochs_warn() -> None:
    for exact, count in ((True, 5), (False, 50)):
        with pytest.warns(RuntimeWarning, match="more than the budget of 5") as caught:
            found = snl(make("mlp"), data(32), 5, max_epochs=1, exact=exact, finetune=None)
        assert found.masks.count() == count
        assert caught[0].filename == __file__


def test_a_given_teacher_is_used() -> None:
    torch.manual_seed(0)
    teacher = make("mlp")
    nn.init.normal_(teacher.get_parameter("5.weight"))
    ours = [snl(make("mlp"), data(32), 20, teacher=t, **QUICK) for t in (None, teacher)]
    assert not same(state(ours[0].model), state(ours[1].model))
