"""Fine-tuning: the numbers of a plain trainer, to the last bit the same when repeated."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import socket

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd import Finetune, Finetuner, ImageData, convolution
from fastbcd.evaluation import accuracy
from fastbcd.finetuning import LOOK_EVERY
from fastbcd.fusion import fused
from fastbcd.normalisation import NormActivation
from fastbcd.teacher import BATCH, TeacherLogits
from nets import TRACEABLE, images, make, thinned

SMALL = Finetune(epochs=2, lr=0.05, batch_size=16, padding=1)


def plain_trainer(net, data, s: Finetune, teacher, seed: int, step: int) -> float:
    """What a user would write: eager, NCHW, the teacher's forward in every batch."""
    net.train()
    make_optimizer = {
        "sgd": lambda p: torch.optim.SGD(
            p, s.lr, momentum=s.momentum, weight_decay=s.weight_decay, foreach=False
        ),
        "adam": lambda p: torch.optim.Adam(p, s.lr, weight_decay=s.weight_decay, foreach=False),
    }
    optimizer = make_optimizer[s.optimizer](net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.epochs)
    divergence = nn.KLDivLoss(reduction="batchmean")
    for epoch in range(s.epochs):
        total = 0.0
        batches = data.train_batches(
            s.batch_size, seed=seed, step=step, epoch=epoch, padding=s.padding, flip=s.flip
        )
        for x, labels, _, _ in batches:
            logits = net(x)
            loss = F.cross_entropy(logits, labels)
            if teacher is not None:
                with torch.no_grad():
                    truth = F.softmax(teacher(x) / s.temperature, 1)
                student = F.log_softmax(logits / s.temperature, 1)
                loss = loss + s.distill * s.temperature**2 * divergence(student, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        schedule.step()
    return total / len(data)


def pair(n: int = 40, seed: int = 0) -> ImageData:
    return fastbcd.data.as_data(images(n, seed))


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def assert_same(one: dict, other: dict) -> None:
    for name in one:
        assert torch.equal(one[name], other[name]), name


def without_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


# -------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", [*TRACEABLE, "untraceable"])
@pytest.mark.filterwarnings("ignore:.*torch.fx cannot trace:RuntimeWarning")
def test_equals_the_plain_trainer(name, optimizer) -> None:
    net = without_dropout(thinned(make(name)))
    start = weights(net)
    twin, teacher, data = copy.deepcopy(net), make(name), pair()
    with torch.no_grad():
        teacher.get_parameter(next(iter(dict(teacher.named_parameters())))).mul_(1.3)
    s = dataclasses.replace(SMALL, optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 1e-3)
    result = Finetuner(net, data, s, teacher, seed=3).run(step=2)
    truth = plain_trainer(twin, data, s, teacher.eval(), seed=3, step=2)
    assert result["loss"] == pytest.approx(truth, rel=1e-3)
    assert result["epochs"] == 2
    assert 0 <= result["teacher_seconds"] <= result["seconds"]
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
    st.sampled_from(["resnet", "poly", "mlp"]), st.integers(1, 5), st.sampled_from([7, 16, 100]),
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


def test_bfloat16_trains_about_the_same() -> None:
    net = thinned(make("resnet"))
    twin = copy.deepcopy(net)
    wide = Finetuner(net, pair(), SMALL, make("mlp")).run(step=0)
    amp = dataclasses.replace(SMALL, amp=True)
    narrow = Finetuner(twin, pair(), amp, make("mlp")).run(step=0)
    assert narrow["loss"] != wide["loss"]
    assert narrow["loss"] == pytest.approx(wide["loss"], rel=0.05)
    assert all(p.dtype == torch.float32 for p in twin.parameters())


# ------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize("name", ["resnet", "dense", "poly"])
def test_repeats_to_the_last_bit(name) -> None:
    """Also with dropout (in `dense`), and whether the teacher's logits are known or not."""
    net, teacher, data = thinned(make(name)), make(name), pair(150)
    start = weights(net)
    tuner = Finetuner(net, data, SMALL, teacher, seed=5)
    tuner.run(step=0)
    first = weights(net)
    tuner.run(step=1)
    second = weights(net)
    net.load_state_dict(start)
    tuner.run(step=0)  # the logits are known by now
    assert_same(first, weights(net))
    torch.manual_seed(99)
    Finetuner(net, data, SMALL, teacher, seed=5).run(step=1)  # as after a restart: nothing is
    assert_same(second, weights(net))
    net.load_state_dict(start)
    Finetuner(net, data, SMALL, teacher, seed=6).run(step=0)
    assert any(not torch.equal(v, first[k]) for k, v in weights(net).items())


# ------------------------------------------------------------------------------ the teacher


def test_teacher_logits_are_those_of_its_forward() -> None:
    data, teacher = pair(50), make("resnet")
    cache = TeacherLogits(teacher, data, padding=1)
    for epoch in range(6):
        views = data.view_ids(seed=0, step=0, epoch=epoch, padding=1)
        with torch.no_grad():
            truth = teacher(data.views(torch.arange(50), views, padding=1))
        torch.testing.assert_close(cache.epoch(views), truth)
        assert torch.equal(cache.epoch(views), cache.epoch(views))
    epochs = [data.view_ids(seed=0, step=0, epoch=e, padding=1).tolist() for e in range(6)]
    different = {(sample, view) for views in epochs for sample, view in enumerate(views)}
    assert cache.computed == cache.used == len(different), "each view once"


@pytest.mark.parametrize("name", ["resnet", "mlp", "dense"])
def test_a_lookup_does_not_depend_on_what_is_known(name) -> None:
    data, teacher = pair(BATCH + 30), make(name)
    views = [data.view_ids(seed=0, step=0, epoch=e, padding=1) for e in range(4)]
    cold = [TeacherLogits(teacher, data, padding=1).epoch(v) for v in views]
    warm = TeacherLogits(teacher, data, padding=1)
    for v, truth in zip(views, cold, strict=True):
        mixed = torch.where(torch.arange(len(v)) % 3 == 0, v, views[-1])
        warm.epoch(mixed)
        assert torch.equal(warm.epoch(v), truth)


class Neighbours(nn.Module):
    """A teacher whose logits for an image depend on its place in the batch."""

    def forward(self, x):
        return x.flatten(1)[:, :5] + 1e-6 * torch.arange(x.size(0)).unsqueeze(1)


def test_a_teacher_with_dependent_rows_sees_images_one_at_a_time() -> None:
    data = pair(20)
    cache = TeacherLogits(Neighbours(), data, padding=1)
    views = data.view_ids(seed=0, step=0, epoch=0, padding=1)
    with pytest.warns(RuntimeWarning, match="one at a time"):
        logits = cache.epoch(views)
    truth = data.views(torch.arange(20), views, padding=1).flatten(1)[:, :5]
    assert torch.equal(logits, truth)


@pytest.mark.parametrize("limit", [0, 50 * 18 * 4 + 77 * 20])
def test_a_limited_cache_is_exact_and_says_so_once(limit, recwarn) -> None:
    data, teacher = pair(50), make("mlp")
    full = TeacherLogits(teacher, data, padding=1)
    cache = TeacherLogits(teacher, data, padding=1, limit=limit)
    for epoch in range(4):
        views = data.view_ids(seed=0, step=0, epoch=epoch, padding=1)
        assert torch.equal(cache.epoch(views), full.epoch(views))
    assert cache.rows.shape[0] == cache.used == (77 if limit else 0)
    assert cache.computed > full.computed
    said = [str(w.message) for w in recwarn if "teacher_cache" in str(w.message)]
    assert len(said) == 1
    assert f"{cache.used}" in said[0]


def test_the_teacher_is_copied_and_left_alone() -> None:
    net, teacher = make("mlp"), make("mlp").train()
    before = weights(teacher)
    tuner = Finetuner(net, pair(), SMALL, teacher)
    tuner.run(step=0)
    assert teacher.training
    assert_same(before, weights(teacher))


# ----------------------------------------------------------------------------- the rewriting


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
    check_fused(thinned(ByHand(act)), 3)


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


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 24), st.integers(1, 4), st.booleans(), st.booleans(),
    st.floats(-100, 100),
)  # fmt: skip
def test_norm_and_activation_in_one_call(batch, channels, side, residual, same_grad, mean) -> None:
    """Against double precision: no worse than torch's own batch norm, forward and backward."""
    assume(batch * side > 1)
    torch.manual_seed(0)
    shape = (batch, channels, side, side)
    x, r = torch.randn(shape) * 2 + mean, torch.randn(shape)
    # The gradient of a sum is expanded, not dense.
    grad = torch.ones(1).expand(shape) if same_grad else torch.randn(shape)
    act = fastbcd.MaskedReLU(shape[1:])
    act.mask.copy_(torch.rand(shape[1:]) < 0.5)
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, -1, 1)
    nn.init.uniform_(norm.bias, -1, 1)
    found = []
    for dtype, one_call in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        pair = NormActivation(copy.deepcopy(norm), copy.deepcopy(act)).to(dtype)
        order = torch.channels_last if one_call else torch.contiguous_format
        a, b = (t.detach().to(dtype).clone(memory_format=order).requires_grad_() for t in (x, r))
        if one_call:
            y = pair(a, b if residual else None)
            assert type(y.grad_fn).__name__ == "_NormActivationBackward"
        else:
            y = pair.act(pair.norm(a) + b if residual else pair.norm(a))
        y.backward(grad.to(dtype))
        tensors = [y.detach(), a.grad, pair.norm.weight.grad, pair.norm.bias.grad,
                   pair.norm.running_mean, pair.norm.running_var]  # fmt: skip
        found.append(tensors + ([b.grad] if residual else []))
        assert int(pair.norm.num_batches_tracked) == 1
    # Where z is within rounding of 0 its ReLU may fall to either side.
    edge = bool((found[0][0].abs() < 1e-5).logical_and(found[0][0] != 0).any())
    for truth, plain, ours in zip(*found, strict=True):
        size = truth.abs().max() + 1e-6
        error = (ours - truth).abs().max() / size
        assert edge or error <= 2 * (plain - truth).abs().max() / size + 1e-5


@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (1, 5), (2, 1)])
def test_better_convolutions_are_the_same(stride, kernel) -> None:
    torch.manual_seed(0)
    channels = 4 if kernel == 1 else 128
    conv = nn.Conv2d(channels, 8, kernel, stride, kernel // 2, bias=kernel == 3)
    better = convolution.for_training(conv)
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


def test_an_untraceable_net_is_said_once() -> None:
    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    net = Odd()
    with pytest.warns(RuntimeWarning, match="Odd runs as it is"):
        assert fused(net)[0] is net
    assert fused(net)[1] == torch.contiguous_format


# ------------------------------------------------------------------------ what can go wrong


def test_a_loss_that_is_not_finite_is_named() -> None:
    net = make("mlp")
    with torch.no_grad():
        net.get_parameter("5.bias")[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the loss \(nan\).*step 4, epoch 0, batch 0"):
        Finetuner(net, pair(), SMALL).run(step=4)


def test_a_gradient_that_is_not_finite_is_named(monkeypatch) -> None:
    net, calls = make("mlp"), []

    def spoil(grad):
        calls.append(1)
        return grad * math.inf if len(calls) == 5 else grad

    net.get_parameter("1.weight").register_hook(spoil)
    monkeypatch.setattr("fastbcd.finetuning.LOOK_EVERY", 2)
    with pytest.raises(FloatingPointError, match=r"gradient of 1.weight .*epoch 1, batch 1"):
        Finetuner(net, pair(), SMALL).run(step=0)
    assert LOOK_EVERY > 1


def test_a_teacher_that_is_not_finite_is_named() -> None:
    teacher = make("mlp")
    with torch.no_grad():
        teacher.get_parameter("5.bias")[0] = math.inf
    with pytest.raises(FloatingPointError, match="teacher gives non-finite logits for sample 0"):
        Finetuner(make("mlp"), pair(), SMALL, teacher).run(step=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": -1}, "epochs=-1"), ({"epochs": 2.5}, "epochs=2.5"), ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"), ({"lr": "1"}, "lr='1'"),
        ({"optimizer": "sgdm"}, "optimizer='sgdm'; choose from sgd, adam"),
        ({"momentum": 1.0}, "momentum=1.0"), ({"weight_decay": -1e-4}, "weight_decay"),
        ({"batch_size": 0}, "batch_size=0"), ({"temperature": 0}, "temperature=0"),
        ({"distill": -1}, "distill=-1"), ({"padding": -1}, "padding=-1"), ({"flip": 1}, "flip=1"),
        ({"compile": None}, "compile=None"), ({"amp": "bf16"}, "amp='bf16'"),
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
    with pytest.raises(ValueError, match="teacher is the net itself"):
        Finetuner(net, data, SMALL, net)
    with pytest.raises(ValueError, match=r"shares '0\.1\.weight' with the net"):
        Finetuner(net, data, SMALL, nn.Sequential(net))
    other = nn.Sequential(nn.Flatten(), nn.Linear(192, 7))
    with pytest.raises(ValueError, match="teacher has 7 classes and the net 5"):
        Finetuner(net, data, SMALL, other)
    with pytest.raises(ValueError, match="teacher is on meta and the data on cpu"):
        Finetuner(net, data, SMALL, nn.Linear(192, 5, device="meta"))
    with pytest.raises(ValueError, match="the net on meta"):
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


# ------------------------------------------------------------------------------- many ranks


def run_rank(rank: int, world: int, port: int, folder: str) -> None:
    """One process of a job: fine-tune twice, write down what came out."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    results = {}
    for name in ("mlp", "resnet"):
        net, teacher = thinned(make(name)), make(name)
        # 41 samples: shares of 8 and 8, and in the last batch of 4 and 5.
        tuner = Finetuner(net, pair(41), SMALL, teacher, seed=1)
        loss = [tuner.run(step=s)["loss"] for s in range(2)]
        results[name] = {**weights(net), "loss": torch.tensor(loss, dtype=torch.float64)}
        results[name]["accuracy"] = torch.tensor(accuracy(net, pair(41)))
        computed = torch.tensor(tuner.teacher.computed)
        torch.distributed.all_reduce(computed)
        results[name]["computed"] = computed
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_train_as_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (2, port, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name in ("mlp", "resnet"):
        assert_same(one[name], two[name])
        net, teacher = thinned(make(name)), make(name)
        tuner = Finetuner(net, pair(41), SMALL, teacher, seed=1)
        loss = [tuner.run(step=s)["loss"] for s in range(2)]
        assert int(one[name]["computed"]) == tuner.teacher.computed, "no view twice"
        if name == "mlp":  # without batch norm, which sees other batches there
            assert one[name]["loss"].tolist() == pytest.approx(loss, rel=1e-4)
            for key, value in weights(net).items():
                torch.testing.assert_close(one[name][key], value, rtol=1e-3, atol=1e-5)
            assert float(one[name]["accuracy"]) == pytest.approx(accuracy(net, pair(41)), abs=2.5)


# --------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("name", ["resnet", "sizes"])
def test_accuracy(name) -> None:
    net, (x, labels) = make(name).train(), images(37)
    with torch.no_grad():
        correct = sum(
            int((copy.deepcopy(net).eval()(x[i : i + 1]).argmax(1) == labels[i]).sum())
            for i in range(37)
        )
    before = weights(net)
    assert accuracy(net, (x, labels), batch_size=10) == pytest.approx(100 * correct / 37)
    assert net.training
    assert_same(before, weights(net))
    with pytest.raises(ValueError, match="no images"):
        accuracy(net, pair().first(0))


def test_one_channel_does_not_slow_the_teacher(recwarn) -> None:
    """Its strides are ambiguous: they must be the same in every batch."""
    data = fastbcd.load("fashion-mnist-mini").first(40)
    torch.manual_seed(0)
    teacher = fastbcd.models.resnet20(10, 28, 1, width=8, blocks=1)
    logits = TeacherLogits(teacher, data, padding=1, flip=False)
    logits.epoch(torch.zeros(40, dtype=torch.int64))
    assert logits.batch == BATCH
    assert not recwarn.list
