"""Options, inputs and error handling that the commands share."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import fastbcd
from fastbcd import models, private
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import mask_modules, plain_names
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.scoring.accuracy import dtype_of
from fastbcd.starts.checkpoints import files as checkpoints_files
from fastbcd.training.settings import Finetune

# Options of a group by name: default (its type is the option's) and help.
Values = Mapping[str, tuple[Any, str]]
DISTILLATION: Values = {
    "temperature": (4.0, "temperature of the distillation"),
    "distill": (1.0, "weight of the distillation"),
}
DOWNLOADABLE = ("cifar10", "cifar100")  # through torchvision


# ------------------------------------------------------------------------------- options


def add_values(parser: argparse.ArgumentParser, title: str, values: Values) -> Any:
    """A group of options that are numbers; returns the group."""
    group = parser.add_argument_group(title)
    for name, (default, text) in values.items():
        text = f"{text} (%(default)s)".strip()
        group.add_argument(flag(name), type=type(default), default=default, help=text)
    return group


def chosen(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of some options as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def flag(name: str) -> str:
    """
    >>> flag("run_dir")
    '--run-dir'
    """
    return f"--{name.replace('_', '-')}"


def add_net_options(parser: argparse.ArgumentParser) -> None:
    """Options for the net and its weights."""
    group = parser.add_argument_group("net")
    which = group.add_mutually_exclusive_group()
    names = ", ".join(models.NAMES)
    which.add_argument("--arch", default="resnet18", help=f"one of {names} (resnet18)")
    which.add_argument("--model", metavar="MODULE:FUNCTION",
                       help="your own net: a function without arguments that returns an nn.Module; "
                       "it is converted if it has no masks")  # fmt: skip
    group.add_argument("--replacement", choices=("identity", "poly"), default="identity",
                       help="what a removed ReLU becomes (%(default)s)")  # fmt: skip
    group.add_argument("--weights", type=Path, metavar="PATH",
                       help="a state_dict (.safetensors, .pt) or a run directory")  # fmt: skip


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options for the data and the run."""
    add = parser.add_argument_group("data").add_argument
    add("--data", default="cifar100", metavar="NAME",
        help="cifar10, cifar100, tiny-imagenet, fashion-mnist-mini or an .npz file "
        "(%(default)s)")  # fmt: skip
    add("--root", type=Path, help="folder of the data ($FASTBCD_DATA, else ./data)")
    add(
        "--download",
        action="store_true",
        help=f"download the data into --root if it is missing ({', '.join(DOWNLOADABLE)})",
    )
    add = parser.add_argument_group("run").add_argument
    add("--run-dir", type=Path, help="where each finished step is saved (runs/COMMAND-NET-DATA…)")
    add("--resume", choices=("auto", "must", "never"), default="auto",
        help="resume the run in the run directory (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--quiet", action="store_true", help="no progress bars and no line per step")


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Options for the connection between the parties of private inference."""
    add = parser.add_argument
    add("--bandwidth", type=bits_per_second, default=private.costs.LAN_BANDWIDTH,
        help="such as 100Mbit or 40MB/s (1Gbit)")  # fmt: skip
    add("--rtt", type=seconds, default=private.costs.LAN_RTT, help="round trip, such as 40ms (1ms)")


def bits_per_second(text: str) -> float:
    """A bandwidth; bits per second if there is no unit.

    >>> bits_per_second("100Mbit"), bits_per_second("40 MB/s")
    (100000000.0, 320000000.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(bit|b|B)?(?:/s|ps)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth; write 100Mbit or 40MB/s")
    value = float(match[1]) * 1000.0 ** " kMGT".index(match[2] or " ")
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value * (8 if match[3] == "B" else 1)


def seconds(text: str) -> float:
    """A time; seconds if there is no unit.

    >>> seconds("40ms"), seconds("2")
    (0.04, 2.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 40ms")
    return float(match[1]) * {"ms": 1e-3, "us": 1e-6, "µs": 1e-6}.get(match[2], 1.0)


def run_dir_of(command: str, options: argparse.Namespace, *more: object) -> Path:
    """The run directory: --run-dir, or a name made of the command, the net and the data."""
    if options.run_dir is not None:
        return options.run_dir
    net = options.model.replace(":", ".") if options.model else options.arch
    return Path("runs") / "-".join(map(str, [command, net, Path(options.data).stem, *more]))


def run_arguments(options: argparse.Namespace, test: ImageData) -> dict[str, Any]:
    """The keyword arguments that all functions with a run directory share."""
    shared = chosen(options, ("seed", "run_dir", "resume"))
    return {**shared, "test": test, "progress": not options.quiet}


# ------------------------------------------------------------------------------- inputs


def load_data(options: argparse.Namespace) -> tuple[ImageData, ImageData]:
    """The train and the test split, on --device."""
    check_device(options.device)
    try:
        splits = [
            fastbcd.load(options.data, split, root=options.root, download=options.download)
            for split in ("train", "test")
        ]
    except FileNotFoundError as error:
        download = " or --download" if options.data in DOWNLOADABLE else ""
        ways = f"--data PATH.npz or --data NAME with --root FOLDER{download}"
        raise FileNotFoundError(f"--data {options.data}: {error} (here: {ways})") from error
    return splits[0].to(options.device), splits[1].to(options.device)


def check_device(name: str) -> None:
    """Raise if tensors with values cannot be made on the device."""
    try:
        torch.empty(0, device=name).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used: {reason}; use --device cpu") from error


def make_net(options: argparse.Namespace, example: Tensor, classes: int) -> nn.Module:
    """The net of --arch or --model for images like the example, with masks, without --weights."""
    torch.manual_seed(options.seed % 2**63)  # a seed beyond it is refused where it is used
    if options.model is None:
        replacement = {} if options.replacement == "identity" else {"replacement": "poly"}
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


def given_net(options: argparse.Namespace, data: ImageData, *, trained: bool = True) -> nn.Module:
    """The net with --weights; if it should be trained and they are missing, with a warning."""
    net = make_net(options, next(data.batches(2))[0].cpu(), data.need_classes("the net"))
    if options.weights is not None:
        return load_weights(net, options.weights)
    if not trained:
        return net
    if options.model is None:
        warn(f"no --weights: the {options.arch} is untrained; train it with `fastbcd train`")
    else:
        warn(f"no --weights: the net is untrained unless {options.model} returns a trained one")
    return net


def given_teacher(options: argparse.Namespace, data: ImageData) -> nn.Module | None:
    """The net of --teacher, in eval mode; None if it is not given."""
    if options.teacher is None:
        return None
    net = make_net(options, next(data.batches(2))[0].cpu(), data.need_classes("the net"))
    return load_weights(net, options.teacher).eval()


def find_function(name: str) -> Callable[[], Any]:
    """`package.module:function`; modules of the current directory are found too.

    >>> find_function("fastbcd.models:resnet20").__name__
    'resnet20'
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
    return found


def call_model(name: str, example: Tensor) -> nn.Module:
    """The net that `package.module:function` returns, on the CPU; it must accept the example."""
    function, shape = find_function(name), "×".join(map(str, example.shape[1:]))
    with _in_one_line(f"--model {name}: calling it"):
        net = function()
    if not isinstance(net, nn.Module):
        raise ValueError(f"--model {name} returned a {type(net).__name__}, no nn.Module")
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
    weights = read_weights(path)
    own = {k: t for k, t in weights.items() if k.endswith((".mask", ".coef"))}
    mine = net.state_dict()
    for name, tensor in own.items():
        if name not in mine or tensor.shape != mine[name].shape:
            there = tuple(mine[name].shape) if name in mine else "no such name"
            raise ValueError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the net has {there}; "
                f"see --arch, --model and --replacement"
            )
    plain = {k: t for k, t in weights.items() if k not in own}
    checkpoints_files.load_weights(net, plain, str(path))
    net.load_state_dict(own, strict=False)
    return net


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a run, a .safetensors file or a checkpoint."""
    if path.is_dir():
        run = fastbcd.load_run(path)
        if run.weights is None:
            raise ValueError(f"{path} has no final weights yet: finish {run.title} first")
        return run.weights
    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}")
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        return {short: tensors[name] for name, short in plain_names(tensors).items()}
    content = checkpoints_files.read(path)
    return checkpoints_files.state_of(content, str(path), ("state_dict", "model"))[0]


# ------------------------------------------------------------------------------- running


def run_command(
    command: str,
    work: Callable[[], None],
    *,
    arguments: list[str] | None = None,
    run_dir: Path | None = None,
) -> int:
    """Run a command on every rank; returns the exit status. Errors of the user are one line.

    run_dir: of a command that can be resumed with the same arguments.
    """
    given = sys.argv[2:] if arguments is None else arguments
    try:
        with ranks.joined():
            work()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        again = f"fastbcd {command} {shlex.join(given)}"
        if run_dir is not None and run_dir.exists():
            say(f"\ninterrupted; what was finished is in {run_dir}. To resume:\n  {again}")
        else:
            say(f"\ninterrupted before anything was saved. To start again:\n  {again}")
        return 130
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if ranks.world() > 1:
            raise
        print(f"fastbcd {command}: {error}", file=sys.stderr)
        return 2
    return 0


def run_start(
    method: Callable[..., Any],
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    *,
    finetune_epochs: int,
    settings: Callable[[argparse.Namespace], dict[str, Any]],
) -> int:
    """Add the options of both starting points, run the method and report the result."""
    finetuning = {
        "finetune_epochs": (finetune_epochs, "epochs after the masks are fixed"),
        "finetune_lr": (1e-3, ""),
        **DISTILLATION,
        "batch_size": (128, ""),
    }
    parser.add_argument("--budget", type=int, required=True, help="ReLUs to keep")
    add_net_options(parser)
    add_run_options(parser)
    group = add_values(parser, "fine-tuning and distillation", finetuning)
    group.add_argument("--teacher", type=Path, metavar="PATH",
                       help="weights of the teacher (the net's own)")  # fmt: skip
    options = parser.parse_args(arguments)
    name = method.__name__
    options.run_dir = run_dir_of(name, options, options.budget)

    def run() -> None:
        data, test = load_data(options)
        net, teacher = given_net(options, data), given_teacher(options, data)
        finetune = Finetune(
            epochs=options.finetune_epochs, lr=options.finetune_lr,
            **chosen(options, (*DISTILLATION, "batch_size")),
        )  # fmt: skip
        start = method(
            net, data, options.budget, teacher=teacher, finetune=finetune,
            batch_size=options.batch_size, **settings(options),
            **run_arguments(options, test),
        )  # fmt: skip
        a = start.accuracy
        say(
            f"{start.masks.count():,} ReLUs after {len(start.history)} epochs; test accuracy "
            f"{a['trained']:.2f} % with trained masks, {a['thresholded']:.2f} % rounded to bits, "
            f"{a['final']:.2f} % at the end; weights and masks: {options.run_dir}"
        )

    return run_command(name, run, arguments=arguments, run_dir=options.run_dir)


def say(text: str) -> None:
    """Print on the first rank."""
    if ranks.rank() == 0:
        print(text, flush=True)


def warn(text: str) -> None:
    """Print a warning on the first rank, to stderr."""
    if ranks.rank() == 0:
        print(f"fastbcd: warning: {text}", file=sys.stderr, flush=True)
