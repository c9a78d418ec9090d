"""A training step of fine-tuning with distillation: fastbcd against the authors' step.

    make bench                                             the table
    pytest benchmarks/test_finetuning.py -k resnet20       one net

A round trains on a few batches of 128 images, the table shows one; the implementations take turns.
fastbcd's rounds are whole fine-tunes of one epoch, with crops, flips, the optimizer's set-up and
the checks; the peers have their batches ready in memory. Peers:
    authors         eager, NCHW, batch norm, relu(x)*a + (1-a)*x with a float mask, the teacher's
                    forward in every batch, SGD
    authors, NHWC   the same in channels_last
    compiled        torch.compile of the student and of the teacher, in channels_last
    fastbcd, cold   views that the teacher has not seen, as at the beginning of a run
    fastbcd         views that the teacher has seen, as in all but the beginning
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastbcd
from nets import build
from test_scoring import authors_net, peak_memory

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CASES = [
    ("resnet18", 100_000, 2),
    ("resnet20", 20_000, 8),
]  # ReLUs left, batches in a round
PEERS = ["authors", "authors, NHWC", "compiled", "fastbcd, cold", "fastbcd"]
BATCH, LR, MOMENTUM, DECAY, T = 128, 1e-3, 0.9, 5e-4, 4.0


class AuthorsStep:
    """CE + T²·KL against the teacher, which runs on every batch; SGD with momentum."""

    def __init__(self, net, teacher: nn.Module, last: bool, compiled: bool) -> None:
        self.net = authors_net(net).train()
        if last:
            self.net.to(memory_format=torch.channels_last)
            teacher.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY
        )
        self.student: Callable = self.net
        self.teacher: Callable = teacher
        if compiled:
            self.student = torch.compile(self.net, dynamic=False)
            self.teacher = torch.compile(teacher, dynamic=False)

    def __call__(self, x: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            truth = F.softmax(self.teacher(x) / T, 1)
        logits = self.student(x)
        divergence = F.kl_div(
            F.log_softmax(logits / T, 1), truth, reduction="batchmean"
        )
        loss = F.cross_entropy(logits, labels) + T * T * divergence
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def authors(
    implementation: str, net, teacher, data: fastbcd.ImageData
) -> Callable[[], float]:
    last = implementation != "authors"
    order = torch.channels_last if last else torch.contiguous_format
    step = AuthorsStep(net, teacher, last, compiled=implementation == "compiled")
    batches = list(
        data.train_batches(BATCH, seed=0, step=0, epoch=0, memory_format=order)
    )

    def run() -> float:
        return sum(step(x, labels) for x, labels, _, _ in batches) / len(batches)

    return run


def ours(
    implementation: str, net, teacher, data: fastbcd.ImageData
) -> Callable[[], float]:
    settings = fastbcd.Finetune(
        epochs=1,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        batch_size=BATCH,
        temperature=T,
    )
    tuner = fastbcd.Finetuner(net, data, settings, teacher)
    rounds = 0

    def run() -> float:
        nonlocal rounds
        step = rounds if implementation == "fastbcd, cold" else 0
        rounds += 1
        return tuner.run(step)["loss"]

    return run


@pytest.fixture(scope="module")
def truths() -> dict:
    return {}


# The topmost parameter varies fastest, so the peers of a case run one after the other.
@pytest.mark.parametrize("implementation", PEERS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "relus", "batches"), CASES)
def test_finetune(
    benchmark, truths, implementation, name, relus, batches, device
) -> None:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(
        256, (batches * BATCH, 3, 32, 32), dtype=torch.uint8, generator=g
    )
    labels = torch.arange(batches * BATCH) % 10
    data = fastbcd.ImageData.from_arrays(images, labels).to(device)
    teacher = build(name).to(device)
    net = fastbcd.convert(teacher, next(data.batches(2))[0])
    masks = fastbcd.masks(net)
    gone = masks.sample(masks.total - relus, seed=0, step=0, trial=0)
    fastbcd.set_masks(net, masks.without(gone))
    benchmark.group = (
        f"fine-tune {name}, {relus:,} ReLUs, {batches * BATCH} images, {device}"
    )
    benchmark.extra_info.update(
        implementation=implementation, divide=batches
    )  # a step's time
    make = ours if implementation.startswith("fastbcd") else authors
    run = make(implementation, net, teacher, data)
    loss = run()
    assert loss == pytest.approx(truths.setdefault((name, device), loss), rel=1e-3), (
        "same training"
    )

    def once() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(once, rounds=3, warmup_rounds=0 if name == "resnet18" else 1)
    benchmark.extra_info["memory"] = peak_memory(once, device)
