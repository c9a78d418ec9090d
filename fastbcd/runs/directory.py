"""Run directories: what is on disk between two steps, so that a run survives a kill at any moment.

    config.json                   the settings, the net and the data
    start.safetensors             the state before the first step
    state.safetensors             the state after the last finished step
    state.previous.safetensors    the state before that
    history.jsonl                 the history for other programs; it is never read

A state holds the tensors, the records of all steps, the digest of the config.json and the start
that it was written beside, and a SHA-256 of it all. So a flipped bit and a file of another run are
found on reading. A step is finished when its state is in place. One process works in a directory
at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastbcd.runs.config import CONFIG, Config, as_json, read_config
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.ranks import digest

START = "start.safetensors"
STATE = "state.safetensors"
PREVIOUS = "state.previous.safetensors"
HISTORY = "history.jsonl"
STATES = (STATE, PREVIOUS, START)  # the newest first
OWN = (CONFIG, *STATES, HISTORY)


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
        if resume == "must" and not (path / CONFIG).exists():
            raise FileNotFoundError(
                f"there is no run in {path} to resume: config.json is missing; "
                f"resume='auto' would begin one"
            )
        path.mkdir(parents=True, exist_ok=True)
        # A link or a working directory may change during the run.
        self.path = path.resolve()
        self._lock = _locked(self.path)
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
        self._check_alone()
        name = STATE if state.history else START
        content = _encoded(state, self.path / name)
        try:
            write_atomically(self.path / name, content, self.path / PREVIOUS)
            if state.history:
                self._export(state.history)
        except OSError as error:
            raise OSError(
                error.errno,
                f"step {len(state.history)} could not be written into the run directory "
                f"{self.path}: {error.strerror}; the steps before it are intact: free some space "
                f"(or correct the permissions) and start the same command again",
            ) from error

    def _begin(self, config: Config, resume: str) -> None:
        """Write config.json, or compare it with the one that is there."""
        present = sorted(
            p.name for p in self.path.iterdir() if not p.name.startswith(".")
        )
        if resume == "never" and present:
            raise FileExistsError(
                f"run_dir {self.path} is not empty (it holds {present[0]}); name another "
                f"directory, or resume the run there: resume='auto'"
            )
        if CONFIG in present:
            config.check_same(read_config(self.path), self.path)
        else:
            for name in present:
                if name in OWN:
                    raise ValueError(
                        f"{self.path} holds {name} but no config.json, so it is not known which "
                        f"run that belongs to; name another directory"
                    )
            text = as_json(config, indent=2) + "\n"
            write_atomically(self.path / CONFIG, text.encode())
        for name in OWN:  # what a killed process has left
            for leftover in self.path.glob(f".{name}.[0-9]*.tmp"):
                leftover.unlink(missing_ok=True)

    def _check_alone(self) -> None:
        """Refuse to write where another process may have taken the lock."""
        lock = self.path / ".lock"
        if lock.exists() and os.path.samestat(os.fstat(self._lock), os.stat(lock)):
            return
        raise RuntimeError(
            f"{lock} was removed or replaced while this run was working, so another process may be "
            f"writing there; nothing more was written: start the same command again"
        )

    def _export(self, history: list[dict[str, Any]]) -> None:
        """Write history.jsonl."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in history]
        write_atomically(self.path / HISTORY, "".join(lines).encode())


def read_state(folder: Path, names: Iterable[str] = STATES) -> State | None:
    """The newest state in a run directory; None if nothing was saved yet.

    ValueError names a file that is damaged or of another run, and the way out.
    """
    for name in names:
        if (folder / name).exists():
            return _decoded(folder / name)
    return None


def read_start(folder: Path) -> State | None:
    """The state before the first step; None if nothing was saved yet."""
    return read_state(folder, (START,))


def _encoded(state: State, path: Path) -> bytes:
    """A state as the bytes of its file."""
    about = state._asdict() | {"beside": _digest_beside(path)}
    tensors = about.pop("tensors")
    run = as_json(about)
    return save(tensors, {"run": run, "sha256": _mark(tensors, run)})


def _decoded(path: Path) -> State:
    """What `_encoded` made."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata["run"])
        beside = about.pop("beside")
        state = State(tensors, **about)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}). {_way_out(path)}") from error
    if metadata.get("sha256") != _mark(tensors, metadata["run"]):
        raise ValueError(
            f"{path} is damaged: its contents do not match their SHA-256. {_way_out(path)}"
        )
    if beside != _digest_beside(path):
        raise ValueError(
            f"{path} was not written beside this {CONFIG} and {START}: one of them is missing, was "
            f"edited or belongs to another run; put the original back"
        )
    return state


def _digest_beside(path: Path) -> str:
    """SHA-256 of the other files that a state belongs to."""
    mark = hashlib.sha256()
    for name in (CONFIG, START):
        file = path.with_name(name)
        if file != path and file.exists():
            mark.update(file.read_bytes())
    return mark.hexdigest()


def _mark(tensors: dict[str, Tensor], run: str) -> str:
    return hashlib.sha256(digest(tensors) + run.encode()).hexdigest()


def _way_out(path: Path) -> str:
    if path.name == STATE and path.with_name(PREVIOUS).exists():
        return (
            f"Move it away and start again, to resume from {PREVIOUS}, one step earlier"
        )
    return "Put a copy of it back, or begin again in another directory"


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
