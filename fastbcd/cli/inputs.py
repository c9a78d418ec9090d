"""The options that the commands share, and the data, nets, weights and budgets that they name."""

from __future__ import annotations

import importlib
import re
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastbcd
from fastbcd import models
from fastbcd.cli.options import call
from fastbcd.data.images import ImageData
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.converted_net import ConvertedNet
from fastbcd.runs.read import replacement
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.starts.checkpoints import files

COSTS = ("seconds", "bytes", "rounds")
# What is in a run's default name.
NAMING = ("command", "arch", "model", "data", "budget", *COSTS)
OF_SITES = (".mask", ".coef")  # ends of the names of what belongs to activations


@dataclass(frozen=True)
class Inputs:
    """Net, data and device.

    Args:
        arch: resnet18 (the default without --model), resnet20 or wide_resnet22_8
        model: MODULE:FUNCTION, your own net: a function without arguments that returns an
            nn.Module; it is converted if it has no masks
        replacement: what a removed ReLU becomes: "identity", "line" or "poly", the line or the
            quadratic of its channel (identity; line in linearize)
        weights: of a trained net: a state_dict (.safetensors, .pt) or a run directory
        data: fashion-mnist-mini, cifar10, cifar100, tiny-imagenet, an .npz file, a folder that
            fastbcd.pack wrote, or folder:PATH with images in PATH/train/CLASS (cifar100)
        root: folder of the data ($FASTBCD_DATA, else ./data)
        download: download CIFAR into --root if it is missing
        seed: of all random numbers (0)
        device: cpu or cuda (cuda, if there is a GPU)
    """

    arch: str | None = None
    model: str | None = None
    replacement: str = "identity"
    weights: Path | None = None
    data: str = "cifar100"
    root: Path | None = None
    download: bool = False
    seed: int = 0
    device: str = "cpu"

    def split(self, name: str) -> ImageData:
        """The "train" or the "test" images."""
        images = fastbcd.load(self.data, name, root=self.root, download=self.download)
        return images.to(self.device)

    def net(self, data: ImageData, weights: Path | None) -> nn.Module:
        """The net for the data, with weights from a file or a run.

        Coefficients in the weights decide what its removed ReLUs are. --replacement makes lines or
        quadratics of a net that has none.
        """
        stored: dict[str, Tensor] = {}
        if weights is not None:
            stored = read_weights(weights)
        kind = replacement(stored, {name.rpartition(".")[0] for name in stored})
        net = self._built(data, kind)
        if weights is not None:
            mine = net.state_dict()
            stored = {n: t for n, t in mine.items() if n.endswith(OF_SITES)} | stored
            files.check_state(mine, stored, str(weights), type(net).__name__)
            net.load_state_dict(stored, strict=False)
        net = net.to(self.device)
        if self.replacement == "line":
            return fastbcd.to_line(net, data)
        if self.replacement == "poly":
            return fastbcd.to_poly(net, data)
        return net

    def _built(self, data: ImageData, replacement: str) -> nn.Module:
        """The untrained net of --model or --arch."""
        # A seed beyond 2**63 is refused where it is used.
        torch.manual_seed(self.seed % 2**63)
        example = next(data.batches(2))[0].cpu()
        if self.model is None:
            return models.build(
                self.arch or "resnet18",
                data.need_classes("the net"),
                example.shape[-1],
                in_channels=example.shape[1],
                replacement=replacement,
            )
        if self.arch is not None:
            raise ValueError(
                f"--arch {self.arch} and --model {self.model}: give one of them"
            )
        return call_model(self.model, example, replacement)


def complete(options: Namespace) -> None:
    """Give a run the options that its command determines.

    >>> options = Namespace(command="bcd", model="nets:small", data="cifar10", budget=30)
    >>> complete(options)
    >>> options.progress, options.run_dir
    (True, PosixPath('runs/bcd-nets.small-cifar10-30'))
    """
    options.progress = getattr(options, "progress", True)
    if "device" not in options and torch.cuda.is_available():
        options.device = "cuda"
    if "run_dir" not in options:
        values = [str(vars(options)[name]) for name in NAMING if name in options]
        options.run_dir = Path("runs") / re.sub(r"[^\w.-]", ".", "-".join(values))


def budget_of(options: Namespace) -> int | list[int] | fastbcd.private.Target:
    """The numbers of ReLUs, or the target, with a number as its bound.

    >>> budget_of(Namespace(budget=5, seconds="800ms", protocol="crypten"))
    Target(seconds=0.8, protocol='crypten', bandwidth='1Gbit', rtt='1ms', relus=5)
    """
    relus = getattr(options, "budget", None)
    if any(name in options for name in COSTS):
        return call(fastbcd.private.Target, options, relus=relus)
    if relus is None:
        raise ValueError("give --budget, --seconds, --bytes or --rounds")
    for name in ("protocol", "bandwidth", "rtt"):
        if name in options:
            raise ValueError(
                f"--{name} goes with --seconds, --bytes or --rounds; leave it out"
            )
    return relus


def call_model(name: str, example: Tensor, replacement: str) -> nn.Module:
    """The net that `package.module:function` returns, with masks, on the CPU.

    Modules of the current directory are found too.

    >>> images = torch.zeros(2, 3, 32, 32)
    >>> type(call_model("fastbcd.models:resnet20", images, "identity")).__name__
    'ResNet'
    """
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--model {name}: write MODULE:FUNCTION, as in my_nets:small")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        net = getattr(importlib.import_module(module), function)()
        if not isinstance(net, nn.Module):
            raise TypeError(f"it returned a {type(net).__name__}, no nn.Module")
        if not any(isinstance(part, MaskedActivation) for part in net.modules()):
            net = fastbcd.convert(
                net, example.to(dtype_of(net)), replacement=replacement
            )
    except Exception as error:  # the user's code can raise anything
        text = " ".join(str(error).split())
        raise ValueError(f"--model {name}: {type(error).__name__}: {text}") from error
    arch: Any = {"model": name, "replacement": replacement}  # a run records it
    if isinstance(net, ConvertedNet):
        net.keep("arch", arch)
    else:
        net.arch = arch
    return net


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a run, a .safetensors file or a checkpoint."""
    if not path.is_dir():
        return files.state_of(files.read(path), str(path), ("state_dict", "model"))[0]
    return fastbcd.load_run(path).final_weights
