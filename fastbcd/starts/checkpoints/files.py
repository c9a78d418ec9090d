"""Foreign checkpoints, read without running their pickles and checked tensor by tensor."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.masking.masks import plain_names

State = dict[str, Tensor]
COUNTER = ".num_batches_tracked"
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8,
           torch.int8, torch.int16, torch.int32, torch.int64}  # fmt: skip


@dataclass
class ImportReport:
    """What an importer found in a file, and what it left out."""

    path: str
    format: str  # "SNL", "AutoReP", "ReLUPruner"
    arch: str = ""
    kept: int = 0
    total: int = 0
    ignored: list[str] = field(default_factory=list)  # entries that the net does not use
    notes: list[str] = field(default_factory=list)  # what a user should know

    def __str__(self) -> str:
        what = f"{self.path}: {self.format} checkpoint of {self.arch}"
        lines = [f"{what}, {self.kept:,} of {self.total:,} ReLUs kept"]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  ignored: {listed(self.ignored, 12)}"] if self.ignored else []
        return "\n".join(lines)


class CheckpointError(ValueError):
    """The file is not what the importer reads; the message says what was found and what to do."""


def require(fine: bool, message: str) -> None:
    """Raise CheckpointError with this message unless the file is fine."""
    if not fine:
        raise CheckpointError(message)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dictionary that torch.save wrote, on the CPU; objects other than plain data refused."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    require(path.is_file(), f"{path} is not a file; give the checkpoint inside it")
    damaged = f"{path} is not a PyTorch checkpoint, or it is damaged"
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save does not compress
                raise ValueError(
                    f"it unpacks to {unpacked:,} bytes, more than the file has: write it with "
                    f"torch.save, uncompressed"
                )
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
        raise CheckpointError(
            f"{path} holds Python objects besides tensors ({found[1]}), and loading those runs "
            f"code from the file; if you trust it, save its tensors alone, where its own code is "
            f"installed: c = torch.load(path, weights_only=False); torch.save({{k: c[k] for k in "
            f"('state_dict', 'model', 'masks') if k in c}}, new_path)"
            if found
            else damaged
        ) from error
    except Exception as error:  # damaged bytes can raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{damaged} ({reason})") from error
    wrong = f"{path} holds a {type(content).__name__}; expected a dictionary with a state_dict"
    require(isinstance(content, Mapping), wrong)
    return dict(content)


def state_of(content: dict[str, Any], path: str, keys: tuple[str, ...]) -> tuple[State, list[str]]:
    """The state_dict under one of `keys`, or the whole file, and the other entries' names.

    Prefixes of DataParallel and torch.compile are taken off.
    """
    entry = next((key for key in keys if isinstance(content.get(key), Mapping)), None)
    state = content if entry is None else content[entry]
    tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)}
    require(
        bool(tensors) and (entry is not None or len(tensors) == len(state)),
        f"{path} has no state_dict: it holds {listed(map(str, content), 8)}; expected one under "
        f"{' or '.join(map(repr, keys))}",
    )
    for name, value in tensors.items():
        check_tensor(value, name, path)
    try:
        plain = {short: tensors[name] for name, short in plain_names(tensors).items()}
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    others = [str(k) for k in content if k != entry] if entry is not None else []
    return plain, others + [f"{entry}.{k}" for k in state if str(k) not in tensors]


def check_tensor(value: Tensor, name: str, path: str) -> None:
    """Refuse a tensor that is not dense numbers in the file: sparse, quantised, meta, expanded."""
    plain = type(value) in (Tensor, nn.Parameter) and not value.is_nested and not value.is_meta
    require(
        plain and value.layout == torch.strided and value.dtype in _DTYPES,
        f"{path}: {name} is not a dense tensor of real numbers but {value.layout}, {value.dtype}, "
        f"on {value.device}; save the dense tensor",
    )
    size = value.untyped_storage().nbytes()
    require(
        value.numel() * value.element_size() <= size,
        f"{path}: {name} has shape {tuple(value.shape)}, but the file has only {size:,} bytes for "
        f"it; save an expanded tensor's clone()",
    )


def check_shape(state: State, name: str, shape: Iterable[int], path: str) -> None:
    """Refuse a tensor that is missing, has another shape or holds values that are not finite."""
    value, shape = state.get(name), tuple(shape)
    found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
    if value is None or tuple(value.shape) != shape:
        raise CheckpointError(f"{path}: {name} {found}, expected {shape}")
    require(bool(value.isfinite().all()), f"{path}: {name} holds values that are not finite")


def check_weights(net: nn.Module, weights: State, path: str) -> None:
    """Compare every name and shape with the net's; masks and coefficients are left out."""
    wanted = {k: v for k, v in net.state_dict().items() if not k.endswith((".mask", ".coef"))}
    # Batch norm's counter is in no formula here, and not in every file.
    wanted = {k: v for k, v in wanted.items() if k in weights or not k.endswith(COUNTER)}
    missing, extra = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    odd = [
        f"{len(names)} {what}: {listed(sorted(names), 4)}"
        for what, names in (("weights missing", missing), ("not expected", extra))
        if names
    ]
    require(not odd, f"{path} does not fit {type(net).__name__}: {'; '.join(odd)}")
    for name, value in wanted.items():
        check_shape(weights, name, value.shape, path)


def listed(names: Iterable[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    names = list(names)
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
