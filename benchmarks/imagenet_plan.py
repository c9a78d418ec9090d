"""ResNet-50 on ImageNet on paper: what `linearize` takes per GPU, from counts and assumed rates.

    python benchmarks/imagenet_plan.py

Counted here: ReLUs, multiply-adds, parameters, and what an image keeps for the backward
pass. Assumed: the rates below. Nothing was run on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fastbcd

IMAGES = 1_281_167
PIXELS = 3 * 224 * 224
GPUS = 8
BATCH = 256  # over all GPUs
EPOCHS = 60
STEPS = 4  # of linearize per epoch on the way down
SAMPLES = 500  # images that linearize scores on
HYPOTHESES = 4
BUDGET = 2_000_000
BF16 = 120e12  # FLOP/s per GPU: of an A100's 312, what training of this net reaches
FLOAT32 = 12e12  # of scoring, of 19.5
YEAR = 365 * 86_400


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [
            (inputs, width, 1, 1),
            (width, width, 3, stride),
            (width, 4 * width, 1, 1),
        ]
        self.layers = nn.ModuleList(conv(*size) for size in sizes)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = conv(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        return F.relu(third(F.relu(second(F.relu(first(x))))) + self.shortcut(x))


def conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def resnet50() -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, (width, count) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(count):
            stride = 2 if stage and not block else 1
            blocks.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    stem = [conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*stem, *blocks, *head)


def kept_bytes(net: nn.Module, x: Tensor) -> float:
    """What one image keeps for the backward pass, in bytes of its dtype."""
    weights = {t.data_ptr() for t in (*net.parameters(), *net.buffers())}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = net.train()(x).sum()
    loss.backward()
    return sum(kept.values()) / len(x)


def main() -> None:
    """Print the plan."""
    x = torch.randn(4, 3, 224, 224)
    net = fastbcd.convert(resnet50(), x)
    relus = fastbcd.masks(net).total
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        net(x)
    forward = counter.get_total_flops() / len(x)
    parameters = sum(p.numel() for p in net.parameters())
    image = kept_bytes(net, x) / 2  # bfloat16
    # Forward, backward twice as much, and the teacher.
    epoch = 4 * forward * IMAGES / BF16 / GPUS
    sample = SAMPLES * forward / FLOAT32 / GPUS
    steps = (relus - BUDGET) // 100
    years = 51 * steps * IMAGES * forward / FLOAT32 / GPUS / YEAR
    each = BATCH // GPUS
    lines = [
        f"{relus:,} ReLUs, {forward / 2e9:.1f} G multiply-adds, {parameters:,} parameters",
        f"images: {IMAGES * PIXELS / 1e9:,.0f} GB mapped, read at "
        f"{IMAGES * PIXELS / epoch / 1e9:.1f} GB/s",
        f"per GPU: weights, gradients, momentum and teacher {16 * parameters / 1e9:.1f} GB, "
        f"activations of {each} images {each * image / 1e9:.1f} GB",
        f"a step: training {epoch / STEPS:.0f} s, scoring {(1 + HYPOTHESES) * sample:.2f} s, "
        f"saliency {3 * sample:.2f} s",
        f"{EPOCHS} epochs: {EPOCHS * epoch / 3600:.1f} hours",
        f"bcd with the paper's values to {BUDGET:,}: {steps:,} steps, {years:,.0f} years at most",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
