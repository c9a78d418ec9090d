"""`fastbcd demo`: a small trained ResNet on embedded images, from all its ReLUs to a thousand.

The weights in fastbcd/data/assets/demo-resnet.safetensors are the result of

    fastbcd train --model fastbcd.cli.demo:small_resnet --data fashion-mnist-mini --epochs 60 \
        --batch-size 64 --padding 2 --run-dir runs/demo-dense
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import nn

import fastbcd
from fastbcd.cli.inputs import say
from fastbcd.private.units import si
from fastbcd.runs.read import SavedRun

BUDGET, EPOCHS, TEST_EVERY = 1_000, 16, 4
NETWORK: dict[str, Any] = {"protocol": "crypten", "bandwidth": "100Mbit", "rtt": "40ms"}


def small_resnet() -> nn.Module:
    """A narrow ResNet-8 for 28×28 images, untrained: 28,224 ReLUs.

    >>> fastbcd.masks(small_resnet()).count()
    28224
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=8, blocks=1)


def trained_resnet() -> nn.Module:
    """The same with the embedded weights, in eval mode."""
    net = small_resnet()
    file = resources.files("fastbcd.data") / "assets" / "demo-resnet.safetensors"
    net.load_state_dict(load(file.read_bytes()), strict=False)  # it has no masks
    return net.eval()


def show(run_dir: Path, images: int = 8_000, tests: int = 2_000, epochs: int = EPOCHS) -> None:
    """Run or resume it on so many train and test images, and show the results."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(tests)
    dense = trained_resnet()
    accuracy = fastbcd.accuracy(dense, test)
    say(f"a trained ResNet: {fastbcd.masks(dense).count():,} ReLUs, test {accuracy:.2f} %")
    fastbcd.linearize(
        dense, train, BUDGET, epochs=epochs, test=test, samples=min(500, images), padding=2,
        batch_size=64, lr=0.03, test_every=TEST_EVERY, run_dir=run_dir,
    )  # fmt: skip
    run = fastbcd.load_run(run_dir)
    say(f"\n{table(run)}\n\n{gain(run)}")
    try:
        page = fastbcd.report.write([run_dir], run_dir / "report", **NETWORK)
        say(f"a page with figures: {page}")
    except ImportError as error:
        say(f"no page with figures: {error}")


def table(run: SavedRun) -> str:
    """Accuracy after the steps that were tested, and the ReLUs of each site."""
    start = run.begin.test_accuracy or 0.0
    lines = [f"{'':10} {'ReLUs':>8} {'test':>8} {'seconds':>8}"]
    lines.append(f"{'start':10} {run.start.count():>8,} {start:>7.2f}%")
    spent = 0.0  # since the last row
    for step in run.history:
        spent += sum(step.seconds.values())
        if step.test_accuracy is not None:
            name = f"step {step.number}"
            lines.append(f"{name:10} {step.after:>8,} {step.test_accuracy:>7.2f}% {spent:>8.1f}")
            spent = 0.0
    lines.append(f"\n{'site':18} {'start':>8} {'end':>8}")
    end = run.masks.counts() if run.masks else {}
    lines += [f"{site:18} {n:>8,} {end[site]:>8,}" for site, n in run.start.counts().items()]
    return "\n".join(lines)


def gain(run: SavedRun) -> str:
    """What was gained, in one sentence."""
    now = run.start if run.masks is None else run.masks
    before, after = (fastbcd.private.cost(masks, **NETWORK) for masks in (run.start, now))
    return (
        f"{run.start.count():,} → {run.count:,} ReLUs: private inference of an image by CrypTen at "
        f"100 Mbit/s and 40 ms takes {after.known_seconds:.2f} s instead of "
        f"{before.known_seconds:.2f} s and sends {si(after.bytes, 'B')} instead of "
        f"{si(before.bytes, 'B')}, for a test accuracy of {run.accuracy:.2f} % instead of "
        f"{run.begin.test_accuracy:.2f} %."
    )
