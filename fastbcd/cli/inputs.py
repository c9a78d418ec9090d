"""The data, nets and weights that options name, and what is printed."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import fastbcd
from fastbcd import models
from fastbcd.cli.options import CHOICES
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import mask_modules, plain_names
from fastbcd.runs.read import replacement
from fastbcd.runtime import ranks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.starts.checkpoints import files as checkpoints


def load_data(options: argparse.Namespace) -> tuple[ImageData, ImageData]:
    """The train and the test split, on --device."""
    try:
        torch.empty(0, device=options.device).tolist()  # fails on the device `meta`, too
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"--device {options.device} cannot be used: {reason}; use --device cpu"
        ) from error
    try:
        train, test = (
            fastbcd.load(options.data, split, root=options.root, download=options.download)
            for split in ("train", "test")
        )
    except FileNotFoundError as error:
        download = " or --download" if options.data in CHOICES["downloadable"] else ""
        ways = f"--data PATH.npz or --data NAME with --root FOLDER{download}"
        raise FileNotFoundError(f"--data {options.data}: {error} (here: {ways})") from error
    return train.to(options.device), test.to(options.device)


def make_net(options: argparse.Namespace, example: Tensor, classes: int) -> nn.Module:
    """The net of --arch or --model for images like the example, with masks, without --weights."""
    torch.manual_seed(options.seed % 2**63)  # a seed beyond it is refused where it is used
    if options.model is None:
        replacement = {"replacement": options.replacement}
        net = models.build(options.arch, classes, example.shape[-1], in_channels=example.shape[1],
                           **replacement)  # fmt: skip
        return net.to(options.device)
    net = call_model(options.model, example)
    try:
        mask_modules(net)
    except ValueError:
        net = fastbcd.convert(net, example.to(dtype_of(net)), replacement=options.replacement)
    arch: Any = {"model": options.model, "replacement": options.replacement}
    net.arch = arch  # a run records it
    return net.to(options.device)


def given_net(options: argparse.Namespace, data: ImageData, weights: Path | None) -> nn.Module:
    """The net of the options for the data, with weights from a file or a run.

    Coefficients in the weights decide what its removed ReLUs are. --replacement makes lines or
    quadratics of a net that has none.
    """
    stored, wanted = "identity", options.replacement
    if weights is not None:
        stored = replacement(found := read_weights(weights), sites_of(found))
    own = argparse.Namespace(**{**vars(options), "replacement": stored})
    net = make_net(own, next(data.batches(2))[0].cpu(), data.need_classes("the net"))
    net = net if weights is None else load_weights(net, weights)
    if wanted == "line":
        return fastbcd.to_line(net, data)
    return fastbcd.to_poly(net, data) if wanted == "poly" else net


def trained_net(options: argparse.Namespace, data: ImageData) -> nn.Module:
    """The net with --weights; a warning if they are not given."""
    net = given_net(options, data, options.weights)
    if options.weights is None:
        text = f"the net is untrained unless {options.model} returns a trained one"
        if options.model is None:
            text = f"the {options.arch} is untrained; train it with `fastbcd train`"
        say(f"fastbcd: warning: no --weights: {text}", file=sys.stderr)
    return net


def given_teacher(options: argparse.Namespace, data: ImageData) -> nn.Module | None:
    """The net of --teacher, in eval mode; None if it is not given."""
    return None if options.teacher is None else given_net(options, data, options.teacher).eval()


def call_model(name: str, example: Tensor) -> nn.Module:
    """The net that `package.module:function` returns, on the CPU; it must accept the example.

    Modules of the current directory are found too.

    >>> type(call_model("fastbcd.models:resnet20", torch.zeros(2, 3, 32, 32))).__name__
    'ResNet'
    """
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--model {name}: write MODULE:FUNCTION, as in my_nets:small")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _in_one_line(f"--model {name}: importing {module}"):
        found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"--model {name}: {module} has no function {function!r}")
    with _in_one_line(f"--model {name}: calling it"):
        net = found()
    if not isinstance(net, nn.Module):
        raise ValueError(f"--model {name} returned a {type(net).__name__}, no nn.Module")
    shape = "×".join(map(str, example.shape[1:]))
    trial = _in_one_line(f"--model {name}: the net does not take images of {shape}")
    with trial, eval_mode(net.cpu()), torch.no_grad():
        net(example.to(dtype_of(net)))
    return net


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Any exception of the user's code becomes a ValueError with a message of one line."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{what}: {type(error).__name__}: {text}") from error


def load_weights(net: nn.Module, path: Path) -> nn.Module:
    """Load weights, and masks if there are any; names and shapes must be those of the net."""
    weights, mine = read_weights(path), net.state_dict()
    own = {k: weights.pop(k) for k in list(weights) if k.endswith((".mask", ".coef"))}
    for name, tensor in own.items():
        if name not in mine or tensor.shape != mine[name].shape:
            there = tuple(mine[name].shape) if name in mine else "no such name"
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the net has {there}; "
                f"see --arch, --model and --replacement"
            )
    checkpoints.check_weights(net, weights, str(path))
    net.load_state_dict({**weights, **own}, strict=False)
    return net


def sites_of(weights: dict[str, Tensor]) -> list[str]:
    """The names of the sites that have coefficients in a state_dict."""
    return [name.removesuffix(".coef") for name in weights if name.endswith(".coef")]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a run, a .safetensors file or a checkpoint."""
    if path.is_dir():
        run = fastbcd.load_run(path)
        if run.weights is None:
            raise ValueError(f"{path} has no final weights yet: finish {run.title} first")
        return dict(run.weights)
    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}")
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        return {short: tensors[name] for name, short in plain_names(tensors).items()}
    return checkpoints.state_of(checkpoints.read(path), str(path), ("state_dict", "model"))[0]


def say(text: str, file: Any = None) -> None:
    """Print on the first rank."""
    if ranks.rank() == 0:
        print(text, file=file, flush=True)
