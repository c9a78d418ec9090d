"""Fine-tuning equals a plain trainer and repeats to the last bit."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd import Finetune, Finetuner
from fastbcd.masking.activations import MaskedActivation, MaskedPoly
from fastbcd.training.optimizers import bounded
from helpers.nets import TRACEABLE, images, make, thinned
from helpers.train_cases import SMALL, assert_same, pair, weights


def activations(net: nn.Module) -> list[torch.Tensor]:
    """Filled with the output of every site, one row per sample, when the net is called."""
    seen: list[torch.Tensor] = []
    for module in net.modules():
        if isinstance(module, MaskedActivation):
            module.register_forward_hook(lambda m, given, output: seen.append(output.flatten(1)))
    return seen


def plain_trainer(net, data, s: Finetune, teacher, seed: int, step: int) -> float:
    """What a user would write: eager, NCHW, the teacher's forward in every batch."""
    net.train()
    make_optimizer = {
        "sgd": lambda p: torch.optim.SGD(
            p, s.lr, momentum=s.momentum, weight_decay=s.weight_decay, foreach=False
        ),
        "adam": lambda p: torch.optim.Adam(p, s.lr, weight_decay=s.weight_decay, foreach=False),
    }
    groups = [{"params": [p for name, p in net.named_parameters() if not name.endswith("coef")]}]
    coefs = {"params": [p for name, p in net.named_parameters() if name.endswith("coef")]}
    own = {"weight_decay": 0.0} if s.optimizer == "sgd" else {}
    groups += [{**coefs, **own}] if coefs["params"] else []
    optimizer = make_optimizer[s.optimizer](groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.epochs)
    divergence = nn.KLDivLoss(reduction="batchmean")
    own, given = (activations(n) if s.mismatch else [] for n in (net, teacher))
    for epoch in range(math.ceil(s.epochs)):
        total, seen = 0.0, 0
        for group in optimizer.param_groups[1:] if s.optimizer == "sgd" else ():
            group["lr"] = 0.1 * optimizer.param_groups[0]["lr"]
        batches = data.train_batches(
            s.batch_size, seed=seed, step=step, epoch=epoch, padding=s.padding, flip=s.flip
        )
        share = min(1.0, s.epochs - epoch)
        for x, labels, _, _ in islice(
            batches, max(1, round(share * -(-len(data) // s.batch_size)))
        ):
            logits = net(x)
            loss = F.cross_entropy(logits, labels)
            if teacher is not None:
                with torch.no_grad():
                    truth = F.softmax(teacher(x) / s.temperature, 1)
                student = F.log_softmax(logits / s.temperature, 1)
                loss = loss + s.distill * s.temperature**2 * divergence(student, truth)
            for a, t in zip(own, given, strict=True):
                distance = (F.normalize(a) - F.normalize(t)).norm(dim=1).mean()
                loss = loss + s.mismatch / 2 * distance
            own.clear()
            given.clear()
            optimizer.zero_grad()
            loss.backward()
            for coef in coefs["params"] if s.optimizer == "sgd" else ():
                coef.grad[2:] *= 0.03  # c2 of quadratics
            least = 0.01 if s.optimizer == "sgd" else math.inf
            bounds = [coef.detach()[2:].abs().clamp(min=least) for coef in coefs["params"]]
            if s.clip:
                gradients = [p.grad for p in net.parameters() if p.grad is not None]
                norm = torch.cat([g.flatten() for g in gradients]).norm()
                for gradient in gradients:
                    gradient *= min(1.0, s.clip / norm)
            optimizer.step()
            for coef, most in zip(coefs["params"], bounds, strict=True):
                coef.data[2:].clamp_(-most, most)
            total, seen = total + loss.item() * len(x), seen + len(x)
        schedule.step()
    return total / seen


def without_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


# -------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize(
    ("optimizer", "mismatch", "clip"),
    [("sgd", 0.0, 0.0), ("adam", 0.0, 0.0), ("sgd", 0.7, 0.0), ("sgd", 0.0, 0.5)],
)
@pytest.mark.parametrize("name", [*TRACEABLE, "untraceable"])
@pytest.mark.filterwarnings("ignore:.*torch.fx cannot trace:RuntimeWarning")
def test_equals_the_plain_trainer(name, optimizer, mismatch, clip) -> None:
    net = without_dropout(thinned(make(name)))
    start = weights(net)
    twin, teacher, data = copy.deepcopy(net), make(name), pair()
    with torch.no_grad():
        teacher.get_parameter(next(iter(dict(teacher.named_parameters())))).mul_(1.3)
    lr = 0.05 if optimizer == "sgd" else 1e-3
    s = dataclasses.replace(SMALL, optimizer=optimizer, lr=lr, mismatch=mismatch, clip=clip)
    result = Finetuner(net, data, s, teacher, seed=3).run(step=2)
    truth = plain_trainer(twin, data, s, teacher.eval(), seed=3, step=2)
    assert result["loss"] == pytest.approx(truth, rel=1e-3)
    assert result["epochs"] == 2
    moved = weights(twin)
    for key, value in weights(net).items():
        if not value.is_floating_point():
            assert torch.equal(value, moved[key]), key
            continue
        # In units of how far training moved the tensor: running statistics are covered too.
        distance = (moved[key] - start[key]).abs().max()
        error = (value - moved[key]).abs().max()
        assert error <= 0.02 * distance + 1e-6, f"{key}: {error} of {distance}"


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["resnet", "line", "poly", "mlp"]),
    st.sampled_from([1, 2, 0.01, 0.5, 1.75, 3.25]), st.sampled_from([7, 16, 100]),
    st.integers(0, 2), st.booleans(), st.floats(0.5, 8), st.floats(0, 2),
)  # fmt: skip
def test_any_settings_equal_the_plain_trainer(
    name, epochs, batch, padding, flip, temperature, distill
) -> None:
    s = Finetune(
        epochs=epochs, lr=1e-3, batch_size=batch, padding=padding, flip=flip,
        temperature=temperature, distill=distill,
    )  # fmt: skip
    net, teacher, data = thinned(make(name)), make("mlp"), pair(32)
    twin = copy.deepcopy(net)
    result = Finetuner(net, data, s, teacher, seed=1).run(step=0)
    truth = plain_trainer(twin, data, s, teacher, seed=1, step=0)
    assert result["loss"] == pytest.approx(truth, rel=1e-3)
    assert result["epochs"] == epochs


def test_masks_stay_and_modes_and_memory_are_restored() -> None:
    net = thinned(make("resnet"))
    net.get_submodule("1").train()
    modes = {n: m.training for n, m in net.named_modules()}
    before = fastbcd.MaskSet(fastbcd.masks(net).sites, fastbcd.masks(net).bits)
    random = torch.random.get_rng_state()
    Finetuner(net, pair(), SMALL).run(step=0)
    assert fastbcd.masks(net) == before
    assert {n: m.training for n, m in net.named_modules()} == modes
    assert all(p.is_contiguous() and p.grad is None for p in net.parameters())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_no_epochs_change_nothing() -> None:
    net = make("resnet")
    before = weights(net)
    result = Finetuner(net, pair(), SMALL).run(step=0, epochs=0)
    assert_same(before, weights(net))
    assert "loss" not in result


def test_frozen_parameters_stay() -> None:
    net = make("resnet")
    first = net.get_submodule("0")
    first.requires_grad_(False)
    before, other = first.weight.clone(), net.get_submodule("7").weight.clone()
    Finetuner(net, pair(), SMALL).run(step=0)
    assert torch.equal(first.weight, before)
    assert not torch.equal(net.get_submodule("7").weight, other)


def test_compiled_trains_the_same(monkeypatch) -> None:
    compile_module = nn.Module.compile
    # Everything but the code generation, which takes half a minute.
    monkeypatch.setattr(
        nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager")
    )
    net = thinned(make("mlp"))
    twin = copy.deepcopy(net)
    Finetuner(net, pair(), dataclasses.replace(SMALL, compile=True, epochs=1)).run(step=0)
    Finetuner(twin, pair(), dataclasses.replace(SMALL, epochs=1)).run(step=0)
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_rates_of_an_optimizer_of_ones_own_keep_their_ratio() -> None:
    rates = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    def slow_first(parameters, lr):
        first, *others = parameters
        return Noted([{"params": [first], "lr": 0.1 * lr}, {"params": others}], lr)

    settings = dataclasses.replace(SMALL, optimizer=slow_first, lr=0.05, epochs=2, batch_size=40)
    Finetuner(make("mlp"), pair(40), settings).run(step=0)
    torch.testing.assert_close(rates, [[0.005, 0.05], [0.0025, 0.025]])


# ------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize("name", ["resnet", "dense", "line", "poly"])
def test_repeats_to_the_last_bit(name) -> None:
    """Also with dropout (in `dense`), and with the teacher's logits cached or not."""
    net, teacher, data = thinned(make(name)), make(name), pair(150)
    start = weights(net)
    tuner = Finetuner(net, data, SMALL, teacher, seed=5)
    tuner.run(step=0)
    first = weights(net)
    tuner.run(step=1)
    second = weights(net)
    net.load_state_dict(start)
    tuner.run(step=0)  # the logits are cached now
    assert_same(first, weights(net))
    torch.manual_seed(99)
    Finetuner(net, data, SMALL, teacher, seed=5).run(step=1)  # nothing is cached
    assert_same(second, weights(net))
    net.load_state_dict(start)
    Finetuner(net, data, SMALL, teacher, seed=6).run(step=0)
    assert any(not torch.equal(v, first[k]) for k, v in weights(net).items())


# ------------------------------------------------------------------------ what can go wrong


def test_a_loss_that_is_not_finite_is_named() -> None:
    net = make("mlp")
    with torch.no_grad():
        net.get_parameter("5.bias")[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the loss \(nan\) of batch 0 .*epoch 0, step 4"):
        Finetuner(net, pair(), SMALL).run(step=4)


def test_a_gradient_that_is_not_finite_is_noticed_in_the_next_batch(monkeypatch) -> None:
    net, calls = make("mlp"), []

    def spoil(grad):
        calls.append(1)
        return grad * math.inf if len(calls) == 5 else grad

    net.get_parameter("1.weight").register_hook(spoil)
    monkeypatch.setattr("fastbcd.training.finite.CHECK_EVERY", 2)
    with pytest.raises(FloatingPointError, match=r"loss \(nan\) of batch 2 .* in epoch 1, step 0"):
        Finetuner(net, pair(), SMALL).run(step=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": -1}, "epochs=-1"), ({"epochs": "2"}, "epochs='2'"), ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"), ({"lr": "1"}, "lr='1'"),
        ({"optimizer": "sgdm"}, "optimizer='sgdm'; choose from sgd, adam"),
        ({"momentum": 1.0}, "momentum=1.0"), ({"weight_decay": -1e-4}, "weight_decay"),
        ({"batch_size": 0}, "batch_size=0"), ({"temperature": 0}, "temperature=0"),
        ({"distill": -1}, "distill=-1"), ({"padding": -1}, "padding=-1"), ({"flip": 1}, "flip=1"),
        ({"compile": None}, "compile=None"), ({"amp": "int8"}, "amp='int8'; choose"),
        ({"amp": 0}, "amp=0"), ({"amp": 1.0}, "amp=1.0"),
        ({"teacher_cache": -5}, "teacher_cache=-5"), ({"teacher_cache": 1e9}, "teacher_cache"),
    ],
)  # fmt: skip
def test_bad_settings(changes, words) -> None:
    with pytest.raises((ValueError, TypeError), match=words.replace(".", r"\.")):
        Finetune(**changes)


def test_settings_are_plain_data() -> None:
    s = Finetune(epochs=3, amp=None)
    assert Finetune(**json.loads(json.dumps(dataclasses.asdict(s)))) == s


def test_bad_input() -> None:
    net, data = make("mlp"), pair()
    with pytest.raises(ValueError, match=r"shares \['1\.weight'\] with the net"):
        Finetuner(net, data, SMALL, net)
    with pytest.raises(ValueError, match=r"shares \['0\.1\.weight'\] with the net"):
        Finetuner(net, data, SMALL, nn.Sequential(net))
    other = nn.Sequential(nn.Flatten(), nn.Linear(192, 7))
    with pytest.raises(ValueError, match=r"the teacher returns .*7.* and the net .*5"):
        Finetuner(net, data, SMALL, other)
    with pytest.raises(ValueError, match="data is on cpu and the teacher on meta"):
        Finetuner(net, data, SMALL, nn.Linear(192, 5, device="meta"))
    with pytest.raises(ValueError, match="Linear is on the meta device"):
        Finetuner(nn.Linear(192, 5, device="meta"), data, SMALL)
    with pytest.raises(ValueError, match="no images"):
        Finetuner(net, data.first(0), SMALL)
    x, labels = images(10)
    labels[3] = 5
    with pytest.raises(ValueError, match="label 5 of image 3 is out of range: the net has 5"):
        Finetuner(net, (x, labels), SMALL)
    with pytest.raises(ValueError, match="no parameter to train"):
        Finetuner(copy.deepcopy(net).requires_grad_(False), data, SMALL)
    with pytest.raises(TypeError, match=r"expected fastbcd\.Finetune"):
        Finetuner(net, data, {"epochs": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epochs=-1"):
        Finetuner(net, data, SMALL).run(step=0, epochs=-1)
    with pytest.raises(ValueError, match="step=-1"):
        Finetuner(net, data, SMALL).run(step=-1)


def test_bounds_of_quadratics_take_six_launches_for_any_number_of_sites(gpu) -> None:
    launches = []
    for sites in (1, 20):
        coefs = [nn.Parameter(torch.randn(3, 4).cuda()) for _ in range(sites)]
        for coef in coefs:
            coef.grad = torch.ones_like(coef)
        gpu.reset()
        with bounded(coefs):
            pass
        launches.append(gpu.counts["launch"])
    assert launches == [6, 6]


def test_quadratics_do_not_grow_beyond_their_bound(monkeypatch) -> None:
    """With a large learning rate: |c2| stays below 0.01, or below what it was."""
    start = torch.tensor([-0.04, -0.01, 0.01, 0.04])
    largest = []
    for bound in (0.01, math.inf):
        monkeypatch.setattr("fastbcd.training.optimizers.SQUARES_MOST", bound)
        net, data = thinned(make("poly")), pair(60)
        coefs = [m.coef for m in net.modules() if isinstance(m, MaskedPoly)]
        before = [start.repeat(coef.shape[1] // 4) for coef in coefs]
        with torch.no_grad():
            for coef, c2 in zip(coefs, before, strict=True):
                coef[2] = c2
        Finetuner(net, data, Finetune(epochs=2, lr=0.1, batch_size=10, padding=1)).run(step=0)
        over = (coef.detach()[2].abs() / c2.abs().clamp(min=0.01)
                for coef, c2 in zip(coefs, before, strict=True))  # fmt: skip
        largest.append(float(torch.cat(list(over)).max()))
    assert largest[0] <= 1 < largest[1]
