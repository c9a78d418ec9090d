"""`fastbcd export`: a run's net, or a net with a file of masks, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fastbcd
from fastbcd import ImageData, MaskSet, private, recipes
from fastbcd.cli import options as common
from fastbcd.cli.cost import read_masks
from fastbcd.runs.read import quadratics, read


def main(arguments: list[str] | None = None) -> int:
    """Write the gather form as .pt2 or .onnx."""
    parser = argparse.ArgumentParser(
        prog="fastbcd export",
        description="Write a net in which each site evaluates only the ReLUs it keeps. The file "
        "takes normalised images.",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="RUN|MASKS",
        help="a run directory; or a file of masks, with --weights")  # fmt: skip
    add("--out", type=Path, required=True, metavar="PATH",
        help="NAME.pt2 (torch.export) or NAME.onnx")  # fmt: skip
    common.add_net_options(parser)
    parser.add_argument_group("data").add_argument(
        "--data", default="cifar100", metavar="NAME",
        help="gives the size of images and the number of classes: "
        f"{', '.join(recipes.DATA)} or an .npz file (%(default)s)",
    )  # fmt: skip
    parser.set_defaults(seed=0, device="cpu")
    options = parser.parse_args(arguments)
    return common.run_command("export", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    like = _like(options.data)
    net = _net(options, like)
    torch.manual_seed(0)
    example = torch.randn(2, *like.images.shape[1:])
    off = private.export(net, example, options.out)
    check = "not compared: onnxruntime is missing" if off is None else f"logits differ by {off:.1g}"
    masks, size = fastbcd.masks(net), "×".join(map(str, example.shape[1:]))
    print(f"{options.out}: {masks.count():,} of {masks.total:,} ReLUs, any batch of {size} "
          f"normalised images; {check}")  # fmt: skip


def _like(name: str) -> ImageData:
    """Blank images of the data set's size; a file is read."""
    if name not in recipes.DATA:
        return fastbcd.load(name)
    shape = recipes.DATA[name]
    images = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    ones = (1.0,) * shape.channels
    return ImageData(images, torch.zeros(2, dtype=torch.int64), ones, ones, shape.classes)


def _net(options: argparse.Namespace, like: ImageData) -> nn.Module:
    if options.source.is_dir():
        if options.weights is not None:
            raise ValueError(f"--weights {options.weights}: a run directory has its own; drop it")
        (masks, poly), weights = read_masks(options.source), read(options.source).last.path
    else:
        if options.weights is None:
            raise ValueError(f"{options.source} holds masks only: give the net's --weights too")
        masks, weights = MaskSet.load(options.source), options.weights
        poly = quadratics(common.read_weights(weights), [site.name for site in masks.sites])
    if poly:
        options.replacement = "poly"
    net = common.load_weights(common.make_net(options, like), weights)
    fastbcd.set_masks(net, masks)
    return net
