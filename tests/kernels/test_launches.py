"""What a GPU is asked to do, counted without one: bytes of partial sums, kernels per batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd.graph.fuse import fused
from fastbcd.kernels.geometry import Geometry
from fastbcd.masking.masks import mask_modules

common = pytest.importorskip("fastbcd.kernels.triton.common")

SITES = {
    "ResNet18": ((64, 32), (128, 16), (256, 8), (512, 4)),
    "ResNet-20": ((16, 32), (32, 16), (64, 8)),
    "WRN-22-8": ((16, 32), (128, 32), (256, 16), (512, 8)),
}
SUMS = {  # rows of sums by channel, sums by unit, tensors that are moved at least
    "affine ReLU": (2, 0, 4),
    "line": (2, 0, 3),
    "affine line": (4, 0, 3),
    "quadratic": (3, 0, 3),
    "affine quadratic": (5, 0, 3),
    "indicator": (3, 1, 3),
    "saliency": (0, 1, 3),
}


@pytest.mark.parametrize("batch", [25, 128, 512])
@pytest.mark.parametrize("net", SITES)
def test_partial_sums_are_a_tenth_of_the_tensors(net, batch) -> None:
    for channels, side in SITES[net]:
        g = Geometry(1, batch, channels, side * side, True, True, False, False)
        for name, (rows, units, streams) in SUMS.items():
            for itemsize in (2, 4):
                p = common.plan(g, itemsize, rows + units, streams)
                tensors = streams * itemsize * batch * channels * side * side
                by_unit = p.chunks * channels * side * side * units * (p.chunks > 1)
                partial = 4 * 2 * (p.slots * p.width * rows + by_unit)  # written and read
                assert partial <= 0.1 * tensors, (name, channels, itemsize, p)


def prepared(replacement: str) -> Any:
    """A ResNet-20 on the fake device, and the number of its convolutions and sites."""
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(num_classes=5, image_size=8, replacement=replacement)
    convolutions = sum(isinstance(m, nn.Conv2d) for m in net.modules())
    return net.to("cuda"), convolutions + len(mask_modules(net))


def test_a_scored_batch_launches_as_many_kernels_whatever_replaces_a_relu(gpu) -> None:
    """The whole batch: images, the base and the hypotheses, metric and loss."""
    counts = {}
    for replacement in ("identity", "line", "poly"):
        net, calls = prepared(replacement)
        net.eval()
        masks, launches = fastbcd.masks(net), []
        removals = torch.stack([masks.sample(20, seed=0, step=0, trial=t) for t in range(8)])
        for images in (16, 24):  # two batches and three
            x = torch.randint(0, 256, (images, 3, 8, 8), dtype=torch.uint8)
            data = fastbcd.ImageData.from_arrays(x, torch.arange(images) % 5).to("cuda")
            gpu.reset()
            options = {"batch_size": 8, "wave": 8, "precision": "float32"}
            fastbcd.score(net, removals, data, engine=fastbcd.Engine("stacked", **options))
            launches.append(Counter({
                place: n for (kind, place), n in gpu.places.items() if kind == "launch"
            }))  # fmt: skip
        of_batch = launches[1] - launches[0]
        net_itself = ("ops/", "scoring/program.py")
        inside = sum(n for place, n in of_batch.items() if place.startswith(net_itself))
        # The base and the hypotheses share what comes before the first change.
        assert inside <= 1.1 * 2 * calls + 5
        # Images and labels 3, the base's outputs among the others 1, metric and loss 13.
        assert of_batch.total() <= inside + 17
        counts[replacement] = of_batch.total()
    assert len(set(counts.values())) == 1, counts


def test_a_training_step_launches_one_more_kernel_per_site_for_lines(gpu) -> None:
    """The second stage of the sums; a backward is two launches."""
    found = {}
    for replacement in ("identity", "line", "poly"):
        net, _ = prepared(replacement)
        sites = len(mask_modules(net))
        model, layout = fused(net.train())
        model.train()
        x = torch.randn(8, 3, 8, 8).to("cuda").contiguous(memory_format=layout)
        gpu.reset()
        F.cross_entropy(model(x), torch.arange(8).to("cuda") % 5).backward()
        found[replacement] = gpu.counts["launch"]
    assert found["line"] == found["poly"] <= found["identity"] + sites
