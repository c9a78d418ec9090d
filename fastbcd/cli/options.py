"""What the commands share: options for nets and data, and an end that says how to go on."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fastbcd
from fastbcd import models
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import mask_modules, plain_name
from fastbcd.runs.directory import STATES, read_state
from fastbcd.runtime import ranks
from fastbcd.starts.checkpoints import files as checkpoints_files
from fastbcd.training.dense import MOMENTUM

FORMATS = ("plain", "snl", "autorep", "relupruner")


# ------------------------------------------------------------------------------- options


def add_net_options(parser: argparse.ArgumentParser) -> None:
    """Which net, with which weights."""
    group = parser.add_argument_group("net")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--arch", default="resnet18", help=f"one of {', '.join(models.NAMES)}")
    which.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="your own: a function without arguments that returns an nn.Module; converted if it "
        "has no masks",
    )
    group.add_argument("--replacement", choices=("identity", "poly"), default="identity",
                       help="what a removed ReLU becomes (%(default)s)")  # fmt: skip
    group.add_argument("--weights", type=Path, metavar="PATH",
                       help="a state_dict (.safetensors, .pt) or a run directory")  # fmt: skip


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Which data, where to, how."""
    group = parser.add_argument_group("data")
    group.add_argument("--data", default="cifar100", metavar="NAME",
                       help="cifar10, cifar100, tiny-imagenet, fashion-mnist-mini or an .npz file "
                       "(%(default)s)")  # fmt: skip
    group.add_argument("--root", type=Path, help="folder of the data ($FASTBCD_DATA, else ./data)")
    group = parser.add_argument_group("run")
    group.add_argument("--run-dir", type=Path, help="every finished step is saved there "
                       "(runs/COMMAND-NET-DATA…)")  # fmt: skip
    group.add_argument("--resume", choices=("auto", "must", "never"), default="auto",
                       help="go on with what is in the run directory (%(default)s)")  # fmt: skip
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    group.add_argument("--quiet", action="store_true", help="no bars, no line a step")


def name_run(command: str, options: argparse.Namespace, *more: object) -> Path:
    """The run directory: as given, or named after what the run is about."""
    if options.run_dir is not None:
        return options.run_dir
    net = options.model.replace(":", ".") if options.model else options.arch
    return Path("runs") / "-".join(map(str, [command, net, Path(options.data).stem, *more]))


# ------------------------------------------------------------------------------- inputs


def load_data(options: argparse.Namespace) -> tuple[ImageData, ImageData]:
    """The train and the test split."""
    splits = [fastbcd.load(options.data, split, root=options.root) for split in ("train", "test")]
    return splits[0].to(options.device), splits[1].to(options.device)


def make_net(options: argparse.Namespace, data: ImageData) -> nn.Module:
    """The net that --arch or --model names, with masks, without --weights."""
    torch.manual_seed(options.seed)
    channels, size = data.images.shape[1], data.images.shape[-1]
    if options.model is None:
        replacement = {} if options.replacement == "identity" else {"replacement": "poly"}
        net = models.build(options.arch, data.classes, size, channels, **replacement)
        return net.to(options.device)
    net = find_function(options.model)()
    if not isinstance(net, nn.Module):
        raise ValueError(f"--model {options.model} returned a {type(net).__name__}, no nn.Module")
    try:
        mask_modules(net)
    except ValueError:
        example = next(data.batches(2))[0].cpu()
        net = fastbcd.convert(net.cpu(), example, replacement=options.replacement)
    return net.to(options.device)


def given_net(options: argparse.Namespace, data: ImageData) -> nn.Module:
    """That net with --weights, if they are given."""
    net = make_net(options, data)
    return net if options.weights is None else load_weights(net, options.weights)


def given_teacher(options: argparse.Namespace, data: ImageData) -> nn.Module | None:
    """The net of --teacher, in eval mode; None if it is not given."""
    if options.teacher is None:
        return None
    return load_weights(make_net(options, data), options.teacher).eval()


def find_function(name: str) -> Callable[[], Any]:
    """`package.module:function`, looked for in the current directory too.

    >>> find_function("fastbcd.models:resnet20").__name__
    'resnet20'
    """
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--model {name}: write MODULE:FUNCTION, as in my_nets:small")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"--model {name}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"--model {name}: {module} has no function {function!r}") from error


def load_weights(net: nn.Module, path: Path) -> nn.Module:
    """Weights, and masks if they are there, into the net; every name and shape is checked."""
    weights = read_weights(path)
    own = {k: t for k, t in weights.items() if k.endswith((".mask", ".coef"))}
    mine = net.state_dict()
    for name, tensor in own.items():
        if name not in mine or tensor.shape != mine[name].shape:
            there = tuple(mine[name].shape) if name in mine else "nothing of that name"
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the net has {there}; "
                f"see --arch, --model and --replacement"
            )
    plain = {k: t for k, t in weights.items() if k not in own}
    checkpoints_files.load_weights(net, plain, str(path))
    net.load_state_dict(own, strict=False)
    return net


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a run directory's newest state, a .safetensors file or a checkpoint."""
    if path.is_dir():
        states = [path / name for name in STATES if (path / name).exists()]
        if not states:
            raise FileNotFoundError(f"{path} is no run directory: it holds no {STATES[0]}")
        tensors = read_state(states[0]).tensors
        return {name: t for name, t in tensors.items() if not name.startswith(MOMENTUM)}
    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}")
    if path.suffix == ".safetensors":
        return {plain_name(name): t for name, t in load_file(path).items()}
    content = checkpoints_files.read(path)
    return checkpoints_files.state_of(content, str(path), ("state_dict", "model"))[0]


# ------------------------------------------------------------------------------- the end


def guarded(
    command: str, arguments: list[str] | None, run_dir: Path, work: Callable[[], None]
) -> int:
    """Do the work on every rank; the exit status. Errors of the user's making are one line."""
    given = sys.argv[2:] if arguments is None else arguments
    try:
        with ranks.joined():
            work()
    except KeyboardInterrupt:
        say(
            f"\ninterrupted; what was finished is in {run_dir}. To go on:\n  "
            f"fastbcd {command} {shlex.join(given)}"
        )
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        if ranks.world() > 1:
            raise
        print(f"fastbcd {command}: {error}", file=sys.stderr)
        return 2
    return 0


def say(text: str) -> None:
    """Once, not on every rank."""
    if ranks.rank() == 0:
        print(text, flush=True)


def one_line_errors(command: str, work: Callable[[], None]) -> int:
    """Do the work; the exit status. Errors of the user's making are one line."""
    try:
        work()
    except (ValueError, OSError, ImportError) as error:
        print(f"fastbcd {command}: {error}", file=sys.stderr)
        return 2
    return 0
