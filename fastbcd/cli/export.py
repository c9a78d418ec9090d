"""`fastbcd export`: a run's net, or a net with a file of masks, for other programs."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import fastbcd
from fastbcd import MaskSet, private
from fastbcd.cli import inputs
from fastbcd.cli.cost import read_masks
from fastbcd.runs.read import replacement

Size = tuple[int, ...]  # of an image


def work(options: argparse.Namespace) -> None:
    """Write the gather form as .pt2 or .onnx."""
    net, size = _from_masks(options) if options.source.is_file() else _from_run(options)
    torch.manual_seed(0)
    off = private.export(net, torch.randn(2, *size), options.out)
    check = "not compared: onnxruntime is missing" if off is None else f"logits differ by {off:.1g}"
    masks, shape = fastbcd.masks(net), "×".join(map(str, size))
    print(f"{options.out}: {masks.count():,} of {masks.total:,} ReLUs, any batch of {shape} "
          f"normalised images; {check}")  # fmt: skip


def _from_run(options: argparse.Namespace) -> tuple[nn.Module, Size]:
    """The net of a run and the size of its images, as recorded unless options give them."""
    if options.weights is not None:
        raise ValueError(f"--weights {options.weights}: a run directory has its own; drop it")
    run = fastbcd.load_run(options.source)
    read_masks(options.source)  # refuses a run that has no final masks
    arch = run.config.net.arch or {}
    size: Size = tuple(run.config.data.shape)
    classes = run.config.data.classes
    if options.data is not None:
        size, classes = _size(options.data)
    if options.arch is None and options.model is None:
        if not arch:
            raise ValueError(f"{run.path} did not record its net: give --arch or --model")
        if "name" in arch:
            made = {"num_classes": classes, "image_size": size[-1], "in_channels": size[0]}
            arch.update(made)
            return run.model, size
        options.model = str(arch.get("model"))
        print(f"calling {options.model}, which {run.path} recorded as its --model")
    options.replacement = replacement(dict(run.weights or {}), run.config.net.sites)
    return run.fill(inputs.make_net(options, torch.zeros(2, *size), int(classes or 0))), size


def _from_masks(options: argparse.Namespace) -> tuple[nn.Module, Size]:
    masks = MaskSet.load(options.source)
    if options.weights is None:
        raise ValueError(f"{options.source} holds masks only: give the net's --weights too")
    weights = inputs.read_weights(options.weights)
    options.replacement = replacement(weights, [site.name for site in masks.sites])
    options.arch = options.arch or "resnet18"
    size, classes = _size(options.data or "cifar100")
    net = inputs.make_net(options, torch.zeros(2, *size), int(classes or 0))
    inputs.load_weights(net, options.weights)
    fastbcd.set_masks(net, masks)
    return net, size


def _size(name: str) -> tuple[Size, int]:
    """The shape of an image, and the number of classes, of data that is read."""
    data = fastbcd.load(name)
    return tuple(data.images.shape[1:]), data.need_classes("the net")
