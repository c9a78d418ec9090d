"""Draw docs/collapsed.png: python docs/draw_collapsed.py"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

import fastbcd
from fastbcd.masking.masks import MaskSet
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import make_program


def small_form() -> tuple[Form, list[str]]:
    """A ResNet-20 with random weights and 40 ReLUs left at each site."""
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(num_classes=10, image_size=32).eval()
    masks = fastbcd.masks(net)
    bits = torch.zeros(masks.total, dtype=torch.bool)
    for site in masks.sites:
        bits[site.start + torch.randperm(site.numel)[:40]] = True
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        program = make_program(net, x[:1])
        kept = MaskSet(masks.sites, bits)
        request = Request(net, kept, [], 1, len(x), x, None, 2**40)
        form = FormBuilder(program, request).build(with_image=False)
    return form, [site.name for site in masks.sites]


def main() -> None:
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9.5, 4.2), constrained_layout=True
    )
    z = torch.linspace(-2, 2, 101)
    left.plot(z, z, "--", color="0.5", label="z: the affine net")
    left.plot(
        z,
        torch.relu(-z),
        ":",
        color="tab:red",
        linewidth=2,
        label="c = relu(-z): the kink",
    )
    left.plot(
        z, torch.relu(z), "-", color="tab:blue", linewidth=2, label="z + c = relu(z)"
    )
    left.axhline(0, color="0.8", linewidth=0.5)
    left.set(title="A kept ReLU is the identity plus a kink", xlabel="z")
    left.legend(loc="lower right", frameon=False)
    form, names = small_form()
    h = torch.zeros(form.kinks, form.kinks)
    for s, matrix in enumerate(form.responses[:-1]):  # the last are the logits
        h[: form.bounds[s], form.bounds[s] : form.bounds[s + 1]] = matrix.T
    size = h.abs().clamp(min=1e-8).log10()
    shown = right.imshow(
        size.masked_fill(h == 0, float("nan")), cmap="viridis", vmin=-5
    )
    middles = [(a + b) / 2 for a, b in pairwise(form.bounds[:-1])]
    right.set_xticks(middles[::3], names[::3], rotation=60, ha="right", fontsize=7)
    right.set_yticks(middles[::3], names[::3], fontsize=7)
    right.set(
        title="H of a ResNet-20: what each kink adds to later sites", ylabel="kink at"
    )
    right.set_xlabel("is added to z at")
    figure.colorbar(shown, ax=right, label="log10 |H|, white: zero", shrink=0.85)
    figure.savefig(Path(__file__).with_name("collapsed.png"), dpi=110)


if __name__ == "__main__":
    main()
