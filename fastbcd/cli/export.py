"""`fastbcd export`: a run's net, or a net with a file of masks, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fastbcd
from fastbcd import private, recipes
from fastbcd.cli import options as common
from fastbcd.cli.kept import find_run, read_kept
from fastbcd.cli.options import one_line_errors
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs.read import quadratics


def main(arguments: list[str] | None = None) -> int:
    """Write the gather form as .pt2 or .onnx."""
    options = _parser().parse_args(arguments)
    return one_line_errors("export", lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd export",
        description="Write a net in which each site evaluates exactly the ReLUs it keeps. Images "
        "must be normalised by whoever feeds it.",
    )
    parser.add_argument("source", type=Path, metavar="RUN|MASKS",
                        help="a run directory; or a file of masks, with --weights")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="PATH",
                        help="NAME.pt2 (torch.export) or NAME.onnx")  # fmt: skip
    common.add_net_options(parser)
    group = parser.add_argument_group("data")
    group.add_argument("--data", default="cifar100", metavar="NAME",
                       help=f"tells the size of images and the number of classes: "
                       f"{', '.join(recipes.DATA)} or an .npz file (%(default)s)")  # fmt: skip
    parser.set_defaults(seed=0, device="cpu")
    return parser


def _run(options: argparse.Namespace) -> None:
    like = _like(options.data)
    net = _net(options, like)
    torch.manual_seed(0)
    example = torch.randn(2, *like.images.shape[1:])
    off = private.export(net, example, options.out)
    check = (
        "not run: onnxruntime is not installed" if off is None else f"logits differ by {off:.1g}"
    )
    kept = masks(net)
    print(f"{options.out}: {kept.count():,} of {kept.total:,} ReLUs, any batch of "
          f"{'×'.join(map(str, example.shape[1:]))} normalised images; {check}")  # fmt: skip


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
        kept, run = read_kept(options.source), find_run(options.source)
        if kept.poly:
            options.replacement = "poly"
        net = common.load_weights(common.make_net(options, like), run)
        set_masks(net, kept.masks)
        return net
    new = MaskSet.load(options.source)
    if options.weights is None:
        raise ValueError(f"{options.source} holds masks alone: give the net's --weights too")
    tensors = common.read_weights(options.weights)
    if quadratics(tensors, [site.name for site in new.sites]):
        options.replacement = "poly"
    net = common.load_weights(common.make_net(options, like), options.weights)
    set_masks(net, new)
    return net
