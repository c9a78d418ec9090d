"""Grouped, depthwise and pointwise convolutions: stacked against sequential, and auto's choice.

    python benchmarks/grouped.py                                   # at 64×64
    python benchmarks/grouped.py --size 32 --images 2000

Whether auto may take stacked for such nets, too. Hypotheses remove 100 ReLUs at random, so almost
no prefix is shared.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import fastbcd
from table import machine

NETS = [
    "mobilenet_v2",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "resnet18",
]


def build(name: str) -> nn.Module:
    """A net of torchvision, with ReLU in place of ReLU6."""
    try:
        from torchvision import models
    except RuntimeError:  # beside a CPU build of torch its compiled part does not load
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold, float dets_scale, "
                       "int dets_zero_point) -> Tensor")  # fmt: skip
        from torchvision import models
    torch.manual_seed(0)
    net = getattr(models, name)(num_classes=10).eval()
    for path, module in list(net.named_modules()):
        if isinstance(module, nn.ReLU6):
            net.set_submodule(path, nn.ReLU())
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", type=int, default=64, help="pixels a side (%(default)s)"
    )
    parser.add_argument("--images", type=int, default=1_000, help="(%(default)s)")
    parser.add_argument("--hypotheses", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--nets", nargs="+", default=NETS)
    o = parser.parse_args()
    print(machine(), flush=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(o.images, 3, o.size, o.size, generator=generator)
    data = x, torch.arange(o.images) % 10
    print(
        f"{'':<22}{'sequential s':>14}{'stacked s':>11}{'ratio':>7}{'auto s':>8}  auto takes"
    )
    for name in o.nets:
        net = fastbcd.convert(build(name), x[:2])
        masks = fastbcd.masks(net)
        removals = [
            masks.sample(100, seed=0, step=0, trial=t) for t in range(o.hypotheses)
        ]
        times, correct = {}, {}
        for engine in ("sequential", "stacked", "auto"):
            begin = time.perf_counter()
            scores = fastbcd.score(net, removals, data, engine=engine)
            times[engine], correct[engine] = (
                time.perf_counter() - begin,
                scores.correct.tolist(),
            )
        assert correct["sequential"] == correct["stacked"] == correct["auto"]
        print(
            f"{name:<22}{times['sequential']:>14.1f}{times['stacked']:>11.1f}"
            f"{times['sequential'] / times['stacked']:>7.2f}{times['auto']:>8.1f}  {scores.engine}",
            flush=True,
        )


if __name__ == "__main__":
    main()
