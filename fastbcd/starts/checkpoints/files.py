"""Foreign checkpoints, read without running their pickles and checked tensor by tensor."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fastbcd.masking.masks import plain_names

State = dict[str, Tensor]
COUNTER = ".num_batches_tracked"
SHOWN = 4  # names that a message lists
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


class CheckpointError(ValueError):
    """The file is not what the importer reads; the message says what it holds and what to do."""


def require(fine: bool, message: str) -> None:
    """Raise CheckpointError with this message unless the file is fine."""
    if not fine:
        raise CheckpointError(message)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dictionary that torch.save or safetensors wrote, on the CPU; plain data only."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    require(path.is_file(), f"{path} is not a file; give the checkpoint inside it")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        _check_uncompressed(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        reason = str(error).partition("Check the documentation")[0].strip()
        raise CheckpointError(
            f"{path} is no checkpoint, or it is damaged, or it holds Python objects "
            f"besides tensors, which run code when they are loaded "
            f"({reason or type(error).__name__}); if you trust it, save its tensors alone: c = "
            f"torch.load(path, weights_only=False); torch.save({{k: c[k] for k in ('state_dict', "
            f"'model', 'masks') if k in c}}, new_path)"
        ) from error
    wrong = f"{path} holds a {type(content).__name__}; expected a dictionary with a state_dict"
    require(isinstance(content, Mapping), wrong)
    return dict(content)


def _check_uncompressed(path: Path) -> None:
    """Refuse an archive that grows when it is unpacked; torch.save does not compress."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > path.stat().st_size:
        raise ValueError(
            f"it unpacks to {unpacked:,} bytes, more than the file has: write it with torch.save, "
            f"uncompressed"
        )


def state_of(
    content: dict[str, Any], path: str, entries: tuple[str, ...]
) -> tuple[State, list[str]]:
    """The state_dict under one of `entries`, or the whole file, and the names of all else.

    Prefixes of DataParallel and torch.compile are taken off.
    """
    present = [key for key in entries if isinstance(content.get(key), Mapping)]
    state = content
    others: list[str] = []
    if present:
        state = content[present[0]]
        others = [str(name) for name in content if name != present[0]]
    tensors = {
        str(name): value for name, value in state.items() if isinstance(value, Tensor)
    }
    require(
        bool(tensors) and (bool(present) or len(tensors) == len(state)),
        f"{path} has no state_dict: it holds {listed(map(str, content), 8)}; expected one under "
        f"{' or '.join(map(repr, entries))}",
    )
    checked(tensors, path)
    try:
        short_names = plain_names(tensors)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    others += [str(name) for name in state if str(name) not in tensors]
    return {short: tensors[name] for name, short in short_names.items()}, others


def checked(tensors: dict[str, Any], path: str) -> State:
    """The tensors; refuses one that is not dense numbers in the file: sparse, quantised, meta."""
    for name, value in tensors.items():
        require(
            type(value) in (Tensor, nn.Parameter)
            and not value.is_nested
            and value.layout == torch.strided
            and value.device.type == "cpu"
            and value.dtype in DTYPES,
            f"{path}: {name} is not a dense tensor of real numbers; save the dense tensor",
        )
        size = value.untyped_storage().nbytes()
        require(
            value.numel() * value.element_size() <= size,
            f"{path}: {name} has shape {tuple(value.shape)}, but the file has only {size:,} bytes "
            f"for it; save an expanded tensor's clone()",
        )
    return tensors


def check_shape(state: State, name: str, shape: Iterable[int], path: str) -> None:
    """Refuse a tensor that is missing, has another shape or holds values that are not finite."""
    expected = tuple(shape)
    require(name in state, f"{path}: {name} is missing, expected {expected}")
    actual = tuple(state[name].shape)
    require(
        actual == expected, f"{path}: {name} has shape {actual}, expected {expected}"
    )
    finite = bool(state[name].isfinite().all())
    require(finite, f"{path}: {name} holds values that are not finite")


def check_state(expected: State, state: State, path: str, net: str) -> None:
    """Refuse a state_dict whose names or shapes differ from those of the net."""
    # Batch norm's counter is in no formula here, and not in every file.
    needed = {name for name in expected if name in state or not name.endswith(COUNTER)}
    differences = {
        "missing": needed - state.keys(),
        "not expected": state.keys() - needed,
    }
    texts = [
        f"{len(names)} {kind}: {listed(sorted(names), SHOWN)}"
        for kind, names in differences.items()
        if names
    ]
    require(not texts, f"{path} does not fit {net}: {'; '.join(texts)}")
    for name in needed:
        check_shape(state, name, expected[name].shape, path)


def listed(names: Iterable[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    every = list(names)
    text = ", ".join(every[:most])
    if len(every) > most:
        text += f" and {len(every) - most} more"
    return text
