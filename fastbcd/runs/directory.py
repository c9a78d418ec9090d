"""Run directories: what is on disk between two steps, so that a run survives a kill at any moment.

    config.json                   the settings, the net and the data
    start.safetensors             the state before the first step
    state.safetensors             the state after the last finished step
    state.previous.safetensors    the state before that
    history.jsonl                 the history for other programs; it is never read

A state holds the tensors, the records of all steps, the digest of config.json, that of the start,
and a SHA-256 of it all. So a flipped bit and a file of another run are found on reading. A step is
finished when its state is in place. One process works in a directory at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastbcd.masking.masks import MaskSet, make_sites
from fastbcd.runs.config import Config, as_json, read_config
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.ranks import digest

FORMAT = "fastbcd.state 3"
START = "start.safetensors"
STATE = "state.safetensors"
PREVIOUS = "state.previous.safetensors"
HISTORY = "history.jsonl"
OWN = ("config.json", START, STATE, PREVIOUS, HISTORY)
# What a process that was killed while it wrote one of these files leaves behind.
LEFTOVER = re.compile(rf"\.({'|'.join(map(re.escape, OWN))})\.\d+\.tmp")
OTHER_RUN = "the file was edited or belongs to another run; put the original file back"


class State(NamedTuple):
    """A run between two steps."""

    tensors: dict[str, Tensor]
    start: dict[str, Any]  # the facts about the state before the first step
    history: list[dict[str, Any]]  # one record per finished step
    done: bool  # whether no step is left


class RunDirectory:
    """A run directory, locked; `close` lets others open it.

    config: that of the run; a directory of another one is refused. resume: "auto"; "must" refuses
    a directory without a run, "never" one that is not empty.
    """

    def __init__(self, path: Path, config: Config, resume: str) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"run_dir {path} is a file; name a directory")
        if resume == "must" and not (path / "config.json").exists():
            raise FileNotFoundError(
                f"there is no run in {path} to resume: config.json is missing; "
                f"resume='auto' would begin one"
            )
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            self._begin(config, resume)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)

    def newest(self) -> State | None:
        """The state after the last finished step; None if nothing was saved yet."""
        state = read_state(self.path)
        if state is not None:
            self._export(state.history)
        return state

    def write(self, state: State) -> None:
        """Make this the state after the last finished step; without a history it is the start."""
        content = _encoded(state, _sha256(self.path / "config.json"), self._start_digest(state))
        try:
            if state.history:
                write_atomically(
                    self.path / STATE, lambda file: file.write(content), self.path / PREVIOUS
                )
                self._append(state.history[-1])
            else:
                write_atomically(self.path / START, lambda file: file.write(content))
        except OSError as error:
            raise OSError(
                error.errno,
                f"step {len(state.history)} could not be written into the run directory "
                f"{self.path}: {error.strerror}; the steps before it are intact: free some space "
                f"(or correct the permissions) and start the same command again",
            ) from error

    def _begin(self, config: Config, resume: str) -> None:
        """Write config.json, or compare it with the one that is there."""
        names = sorted(entry.name for entry in self.path.iterdir() if entry.name != ".lock")
        leftovers = [name for name in names if LEFTOVER.fullmatch(name)]
        present = [name for name in names if name not in leftovers]
        if resume == "never" and present:
            raise FileExistsError(
                f"run_dir {self.path} is not empty (it holds {present[0]}); name another "
                f"directory, or resume the run there: resume='auto'"
            )
        if "config.json" in present:
            config.check_same(read_config(self.path), self.path)
        else:
            self._write_config(config, present)
        for name in leftovers:
            (self.path / name).unlink(missing_ok=True)

    def _write_config(self, config: Config, present: list[str]) -> None:
        for name in present:
            if name in OWN:
                raise ValueError(
                    f"{self.path} holds {name} but no config.json, so it is not known which "
                    f"run that belongs to; name another directory"
                )
        text = as_json(config, indent=2) + "\n"
        write_atomically(self.path / "config.json", lambda file: file.write(text.encode()))

    def _start_digest(self, state: State) -> str:
        if state.history:
            return _sha256(self.path / START)
        return ""

    def _append(self, record: dict[str, Any]) -> None:
        with open(self.path / HISTORY, "ab") as file:
            file.write(_line(record))

    def _export(self, history: list[dict[str, Any]]) -> None:
        """Write history.jsonl, unless it holds these records already."""
        path = self.path / HISTORY
        content = b"".join(map(_line, history))
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, lambda file: file.write(content))


def read_state(folder: Path) -> State | None:
    """The newest state in a run directory; None if nothing was saved yet.

    ValueError names a file that is damaged or of another run, and the way out.
    """
    for name in (STATE, PREVIOUS):
        if (folder / name).exists():
            if not (folder / START).exists():
                raise FileNotFoundError(
                    f"{folder / START} is missing: put it back; it is where the run began"
                )
            return _decoded(folder / name, _sha256(folder / START))
    return read_start(folder)


def read_start(folder: Path) -> State | None:
    """The state before the first step; None if nothing was saved yet."""
    if not (folder / START).exists():
        return None
    return _decoded(folder / START, "")


def masks_in(tensors: dict[str, Tensor], sites: dict[str, list[int]], where: str) -> MaskSet:
    """The masks in a state."""
    bits = []
    for name, shape in sites.items():
        mask = tensors.get(f"{name}.mask".lstrip("."))
        if mask is None or list(mask.shape) != shape:
            raise ValueError(f"{where}: the state has no mask of shape {shape} for site {name!r}")
        bits.append(mask.flatten().bool())
    shapes = {name: tuple(shape) for name, shape in sites.items()}
    return MaskSet(make_sites(shapes), torch.cat(bits))


def _decoded(path: Path, start: str) -> State:
    """What `_encoded` made; start: the digest of the run's start file, "" for the start itself."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata["run"])
        state = State(tensors, about["start"], about["history"], about["done"])
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}). {_way_out(path)}") from error
    if metadata.get("sha256") != _mark(tensors, metadata["run"]):
        raise ValueError(
            f"{path} is damaged: its contents do not match their SHA-256. {_way_out(path)}"
        )
    if about.get("config") != _sha256(path.parent / "config.json"):
        raise ValueError(f"{path} was not written beside this config.json: {OTHER_RUN}")
    if about.get("after") != start:
        raise ValueError(f"{path} was not written beside this {START}: {OTHER_RUN}")
    return state


def _encoded(state: State, config: str, start: str) -> bytes:
    """A state as the bytes of its file."""
    about = {
        "config": config,
        "after": start,
        "start": state.start,
        "history": state.history,
        "done": state.done,
    }
    run = as_json(about)
    metadata = {"format": FORMAT, "run": run, "sha256": _mark(state.tensors, run)}
    return save(state.tensors, metadata)


def _mark(tensors: dict[str, Tensor], run: str) -> str:
    return hashlib.sha256(digest(tensors) + run.encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _way_out(path: Path) -> str:
    if path.name == STATE and (path.parent / PREVIOUS).exists():
        return f"Move it away and start again, to resume from {PREVIOUS}, one step earlier"
    return "Put a copy of it back, or begin again in another directory"


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def _locked(path: Path) -> int:
    """A lock on the directory that lasts while the descriptor is open; a kill releases it."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise RuntimeError(
            f"another process is working in the run directory {path}: wait until it ends, or name "
            f"another directory"
        ) from error
    return descriptor
