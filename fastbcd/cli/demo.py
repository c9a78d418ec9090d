"""`fastbcd demo`: a small trained ResNet on embedded images, from all its ReLUs to a thousand.

The weights in fastbcd/data/assets/demo-resnet.safetensors are the result of

    fastbcd train --model fastbcd.cli.demo:small_resnet --data fashion-mnist-mini --epochs 60 \
        --batch-size 64 --padding 2 --run-dir runs/demo-dense
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import nn

import fastbcd
from fastbcd.private.running import summary
from fastbcd.report.results import headline, result_of
from fastbcd.runtime.show import say

BUDGET = 1_000
NEXT = (
    "linearize --model fastbcd.cli.demo:trained_resnet --data fashion-mnist-mini "
    "--budget 5000 --epochs 8 --padding 2 --run-dir runs/5k"
)
NETWORK: dict[str, Any] = {"protocol": "crypten", "bandwidth": "100Mbit", "rtt": "40ms"}


def small_resnet() -> nn.Module:
    """A narrow ResNet-8 for 28×28 images, untrained: 28,224 ReLUs.

    >>> fastbcd.masks(small_resnet()).count()
    28224
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return fastbcd.models.resnet20(
            10, image_size=28, in_channels=1, width=8, blocks=1
        )


def trained_resnet() -> nn.Module:
    """The same with the embedded weights, in eval mode."""
    net = small_resnet()
    file = resources.files("fastbcd.data") / "assets" / "demo-resnet.safetensors"
    net.load_state_dict(load(file.read_bytes()), strict=False)  # it has no masks
    return net.eval()


def demo(
    run_dir: Path = Path("runs/demo"),
    images: int = 8_000,
    tests: int = 2_000,
    epochs: int = 16,
    private: bool = False,
) -> None:
    """Remove most ReLUs of a small trained ResNet, on embedded images.

    By linearize, in two or three minutes on 2 cores; with matplotlib it writes a page with figures.
    The same command resumes an interrupted demo, or shows the result of a finished one.

    Args:
        run_dir: where every finished step is saved (runs/demo)
        images: train images (8000)
        tests: test images (2000)
        epochs: of training in all (16)
        private: at the end two processes classify an image in private, with both nets; needs
            `make private`
    """
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(tests)
    dense = trained_resnet()
    accuracy = fastbcd.accuracy(dense, test)
    say(
        f"a trained ResNet: {fastbcd.masks(dense).count():,} ReLUs, test {accuracy:.2f} %"
    )
    run = fastbcd.linearize(
        dense, train, BUDGET, epochs=epochs, test=test, samples=min(500, images), padding=2,
        batch_size=64, lr=0.03, test_every=4, run_dir=run_dir,
    )  # fmt: skip
    shown = headline(result_of(run_dir, **NETWORK))
    say("".join(f"\n{name}: {change}" for name, change in shown.items()))
    try:
        page = fastbcd.report.write(
            [run_dir], run_dir / "report", test=test, before=dense, **NETWORK
        )
        say(f"a page with figures: {page}")
    except ImportError as error:
        say(f"no page with figures: {error}")
    say(f"next, another budget: {sys.argv[0]} {NEXT}")
    if not private:
        say("fastbcd demo --private: one image in private, before and after, measured")
        return
    image = next(test.batches(1))[0]
    for name, net in (("before", dense), ("after", run.model)):
        try:
            say(f"{name}: {summary(fastbcd.private.run(net, image))}")
        except ImportError as error:
            say(f"no private inference: {error}")
            return
