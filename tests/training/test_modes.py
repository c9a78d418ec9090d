"""Precision, determinism and synchronised batch norm of the fine-tuning."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import threading

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Finetune, Finetuner
from fastbcd.runtime import ranks
from fastbcd.training.loop import Session
from fastbcd.training.repeat import repeatable
from helpers.nets import images, make
from helpers.rank_cases import said
from helpers.train_cases import SMALL, assert_same, pair, weights


def tuned(net: nn.Module, **changes) -> dict[str, float]:
    return Finetuner(net, pair(), dataclasses.replace(SMALL, **changes)).run(step=0)


def test_float16_is_close_to_float32_and_repeats() -> None:
    net = make("mlp")
    plain, half, again = (copy.deepcopy(net) for _ in range(3))
    exact, found = tuned(plain), tuned(half, amp="fp16")
    assert found["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), half.parameters(),
                                                     strict=True))  # fmt: skip
    tuned(again, amp="fp16")
    assert_same(weights(half), weights(again))
    bf16, same = copy.deepcopy(net), copy.deepcopy(net)
    assert tuned(bf16, amp="bf16")["loss"] == tuned(same, amp=True)["loss"]


class Overflows(torch.autograd.Function):
    """The identity; in the calls that are listed, and in all of them if None is, g becomes inf."""

    bad: list[int | None] = []  # noqa: RUF012
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Overflows.calls += 1
        wrong = Overflows.calls in Overflows.bad or None in Overflows.bad
        return g * torch.inf if wrong else g


def overflowing(bad: list[int | None]) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make("mlp")

        def forward(self, x):
            return self.net(Overflows.apply(x + 0 * self.net.get_parameter("1.weight").sum()))

    Overflows.bad, Overflows.calls = bad, 0
    return Net()


@pytest.mark.filterwarnings("ignore:.*runs as it is, slower than it could")
def test_batches_whose_gradients_overflow_in_float16_are_left_out() -> None:
    """With bfloat16 they are an error, and in float16 too if no scale is small enough."""
    net = overflowing([2])
    tuned(net, amp="fp16")
    assert all(p.isfinite().all() for p in net.parameters())
    with pytest.raises(FloatingPointError, match=r"loss \(nan\) of batch 2 is not finite"):
        tuned(overflowing([2]), amp="bf16")
    with pytest.raises(FloatingPointError, match="float16 gradients overflow at any scale in"):
        tuned(overflowing([None]), amp="fp16", batch_size=2)


def flags() -> tuple[bool, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )


@pytest.mark.parametrize(("fast", "expected"), [(False, (True, True, True, False)),
                                                (True, (False, False, False, True))])  # fmt: skip
def test_algorithms_on_a_gpu(gpu, fast, expected, monkeypatch) -> None:
    """Deterministic ones where torch has them, or the fastest; afterwards as before."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, seen = flags(), []
    net = make("mlp").to("cuda")
    net.register_forward_hook(lambda *_: seen.append(flags()))
    settings = dataclasses.replace(SMALL, fast=fast, epochs=1, amp=False)
    tuner = Finetuner(net, images(16), settings)
    tuner.model.register_forward_hook(lambda *_: seen.append(flags()))
    seen.clear()
    tuner.run(step=0)
    assert set(seen) == {expected}
    assert flags() == before


@pytest.mark.filterwarnings("ignore:after 1 epochs:RuntimeWarning")
@pytest.mark.parametrize("fast", [False, True])
def test_snl_trains_with_these_algorithms(gpu, fast, monkeypatch) -> None:
    seen, plain = set(), Session.epoch
    noted = lambda *a, **k: seen.add(flags()[-1]) or plain(*a, **k)  # noqa: E731
    monkeypatch.setattr(Session, "epoch", noted)
    tune = dataclasses.replace(SMALL, fast=fast, epochs=1, amp=False)
    fastbcd.snl(make("mlp").to("cuda"), images(16), 45, max_epochs=1, finetune=tune, batch_size=8)
    assert seen == {fast}  # of cuDNN's benchmark, for masks and for the fine-tuning


def test_strict_algorithms_of_the_user_stay(gpu) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with repeatable(torch.device("cuda"), 0, 0):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_numbers_differ_by_seed_step_and_rank(monkeypatch) -> None:
    """Each rank drops other units of its own images; the same three give the same again."""
    drawn = []
    for rank, seed, step in (*itertools.product((0, 1), repeat=3), (0, 0, 0)):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        with repeatable(torch.device("cpu"), seed, step):
            drawn.append(torch.rand(8).tolist())
    assert drawn[0] == drawn.pop()
    assert len({tuple(numbers) for numbers in drawn}) == 8


def test_a_second_thread_is_refused_while_one_trains() -> None:
    """With dropout, each would draw numbers that the other's depend on."""
    messages = []
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 5))

    def other(*_) -> None:
        thread = threading.Thread(target=lambda: messages.append(said(lambda: tuned(make("mlp")))))
        thread.start()
        thread.join()

    hook = net.register_forward_hook(other)
    tuner = Finetuner(net, pair(), SMALL)
    tuner.model.register_forward_hook(other)
    tuner.run(step=0)
    assert all("another thread of this process trains" in message for message in messages[-2:])
    hook.remove()
    tuned(make("mlp"))  # afterwards any thread can


def test_what_changes_the_outcome_is_recorded() -> None:
    fields = {field.name for field in dataclasses.fields(Finetune)}
    assert Finetune().describe().keys() == fields - {"teacher_cache"}
    json.dumps(Finetune(optimizer=torch.optim.NAdam, augment=torch.flip).describe())


def test_synchronised_batch_norm(gpu, monkeypatch) -> None:
    """Each rank's model gets SyncBatchNorm with the net's own parameters; the net keeps its own."""
    net = make("resnet").to("cuda")
    settings = dataclasses.replace(SMALL, sync_batch_norm=True)
    monkeypatch.setattr(ranks, "world", lambda: 2)
    tuner = Finetuner(net, images(16), settings)
    found = [m for m in tuner.model.modules() if isinstance(m, nn.SyncBatchNorm)]
    own = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(found) == len(own) > 0
    assert {id(m.weight) for m in found} == {id(m.weight) for m in own}
    assert {m.running_mean.data_ptr() for m in found} == {m.running_mean.data_ptr() for m in own}
    with pytest.raises(ValueError, match="torch has it for GPUs only"):
        Finetuner(make("resnet"), images(16), settings)
