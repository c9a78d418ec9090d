"""Run directories: what is on the disk between two steps, so that a run survives anything.

    config.json                   the settings, and what the net and the data are
    start.safetensors             the state before the first step
    state.safetensors             the state after the last finished step, with that step's record
    state.previous.safetensors    the one before it
    history.jsonl                 one record a step

The state is the only truth: a step is finished when state.safetensors names it. The history is
appended to afterwards; on opening, lines beyond the state are dropped and one that is missing is
taken from the state. So the process may be killed between any two operations. Every state holds
a SHA-256 of itself: one that was cut short or edited is refused, and the one before it is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastbcd.runtime import ranks
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

STATES = ("state.safetensors", "state.previous.safetensors", "start.safetensors")
OWN = ("config.json", "history.jsonl", *STATES)
MISSING = "(not there)"
RESUME = {"auto": "auto", "must": "must", "never": "never", True: "must", False: "never"}


class State(NamedTuple):
    """What stood after `step` finished steps; `record` is the last one's, {} before the first."""

    step: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]


class Unsaved:
    """A run that keeps its history in memory only."""

    state: State | None = None

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Note the record; nothing is written."""
        if step:
            self.history.append(record)

    def close(self) -> None:
        """Nothing is open."""


class RunDirectory:
    """A run on the disk, held open (and locked) by rank 0; every rank gets the same state.

    config: JSON-able, {"settings": …, "net": …, …}; a directory with another one is refused.
    resume: "auto" goes on with a run that is there and else begins one; "must" (True) wants it
    to be there, "never" (False) wants the directory to be empty.
    """

    def __init__(self, path: str | os.PathLike[str], config: dict[str, Any], resume: Any) -> None:
        self.path = Path(path)
        self._lock = -1
        config = json.loads(_json(config))  # tuples become lists, as they do on the disk
        found = json.loads(ranks.on_first(lambda: self._open(config, check_resume(resume))))
        self.history: list[dict[str, Any]] = found["history"]
        self.state: State | None = None
        if found["step"] is not None:
            tensors = {
                name: ranks.from_first(self._read[name] if ranks.rank() == 0 else _empty(*like))
                for name, like in found["tensors"].items()
            }
            self.state = State(found["step"], tensors, found["record"])
        self._read: dict[str, Tensor] = {}

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Make `step` the last finished one. Step 0 is the start."""
        ranks.on_first(lambda: self._save(step, tensors, record))
        if step:
            self.history.append(record)

    def close(self) -> None:
        """Let others open the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ------------------------------------------------------------------ rank 0 alone

    def _open(self, config: dict[str, Any], resume: str) -> str:
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run_dir {self.path} is a file; name a directory")
        present = self.path / "config.json"
        if resume == "must" and not present.exists():
            raise FileNotFoundError(
                f"there is no run in {self.path} to resume: {present.name} is missing; "
                f"resume='auto' would begin one"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path)
        try:
            return self._open_locked(config, resume)
        except BaseException:
            self.close()
            raise

    def _open_locked(self, config: dict[str, Any], resume: str) -> str:
        for left in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
            left.unlink()
        files = sorted(p.name for p in self.path.iterdir() if p.name != ".lock")
        if resume == "never" and files:
            raise FileExistsError(
                f"run_dir {self.path} is not empty (it holds {files[0]}); name another directory, "
                f"or go on with what is there: resume='auto'"
            )
        if "config.json" not in files:
            if stray := [name for name in files if name in OWN]:
                raise ValueError(
                    f"{self.path} holds {stray[0]} but no config.json, so it cannot be told which "
                    f"run that belongs to; name another directory"
                )
            written = {"fastbcd": __version__, **config}
            text = json.dumps(written, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.path / "config.json", lambda file: file.write(text.encode()))
        check_same_config(self.path, config)
        state = newest_state(self.path)
        self._read = state.tensors if state else {}
        found = {
            "step": state.step if state else None,
            "record": state.record if state else {},
            "tensors": {k: [str(t.dtype)[6:], list(t.shape)] for k, t in self._read.items()},
            "history": self._mend_history(state) if state else [],
        }
        return json.dumps(found)

    def _mend_history(self, state: State) -> list[dict[str, Any]]:
        """The records of the finished steps, on the disk as well."""
        path = self.path / "history.jsonl"
        old = path.read_bytes() if path.exists() else b""
        records = finished_records(path, old, state)
        new = b"".join(map(_line, records))
        if new != old:
            write_atomically(path, lambda file: file.write(new))
        return records

    def _save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> str:
        begin = time.perf_counter()
        path = self.path / ("state.safetensors" if step else "start.safetensors")
        keep = self.path / "state.previous.safetensors" if step else None
        try:
            content = state_bytes(State(step, tensors, record))
            write_atomically(path, lambda file: file.write(content), keep)
            if step:
                record.setdefault("seconds", {})["save"] = time.perf_counter() - begin
                with open(self.path / "history.jsonl", "ab") as file:
                    file.write(_line(record))
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"step {step} could not be written into the run directory {self.path}: "
                f"{error.strerror}; what was finished before is whole: make room there (or put "
                f"the permissions right) and start the same command again",
            ) from error
        return ""


# ------------------------------------------------------------------------------- what stands


def newest_state(directory: Path) -> State | None:
    """The newest state; if it is damaged, an error that names the newest one that is not."""
    there = [directory / name for name in STATES if (directory / name).exists()]
    for path in there[:1]:
        try:
            return read_state(path)
        except ValueError as error:
            raise ValueError(f"{error}. {_way_out(path, there[1:])}") from error
    return None


def finished_records(path: Path, history: bytes, state: State) -> list[dict[str, Any]]:
    """The records of the steps behind the state; `history` is what the file at `path` holds.

    It may be cut short, ahead of the state, or behind it by the record that the state has.
    """
    records: list[dict[str, Any]] = []
    for line in history.decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break  # cut short by a kill
        if not isinstance(record, dict) or record.get("number") != len(records) + 1:
            break
        records.append(record)
    if len(records) == state.step - 1:
        records.append(state.record)
    if len(records) < state.step:
        raise ValueError(
            f"{path} was edited: it has {len(records)} of the {state.step} records that go "
            f"with the state; put the file back, or begin anew from these weights in another "
            f"directory"
        )
    return records[: state.step]


# ------------------------------------------------------------------------------- one state


def state_bytes(state: State) -> bytes:
    """A state as a safetensors file whose metadata holds the step, its record and a SHA-256."""
    about = {"step": str(state.step), "record": _json(state.record)}
    metadata = {"format": "fastbcd.state", **about, "sha256": _checksum(state.tensors, about)}
    return save(state.tensors, metadata)


def read_state(path: Path) -> State:
    """What `state_bytes` made; ValueError if any of it was changed or is missing."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    about = {key: metadata.get(key, "") for key in ("step", "record")}
    if metadata.get("sha256") != _checksum(tensors, about):
        raise ValueError(f"{path} is damaged: its contents do not match their SHA-256")
    return State(int(about["step"]), tensors, json.loads(about["record"]))


def _checksum(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    text = json.dumps(about, sort_keys=True).encode()
    return hashlib.sha256(ranks.digest(tensors) + text).hexdigest()


def _way_out(damaged: Path, others: list[Path]) -> str:
    for path in others:
        try:
            step = read_state(path).step
        except ValueError:
            continue
        return (
            f"The state of step {step}, {path.name}, is whole: move {damaged.name} away and start "
            f"again to go on from there"
        )
    return "No whole state is left beside it: begin anew in another directory"


# ------------------------------------------------------------------------------- checks


def check_resume(resume: Any) -> str:
    """One of "auto", "must", "never".

    >>> check_resume(True), check_resume("auto")
    ('must', 'auto')
    """
    if not isinstance(resume, str | bool) or resume not in RESUME:
        raise ValueError(f"resume={resume!r}; choose from 'auto', 'must' (True), 'never' (False)")
    return RESUME[resume]


def check_same_config(path: Path, config: dict[str, Any]) -> None:
    """Refuse a directory of another run, naming the first difference."""
    file = path / "config.json"
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not readable as JSON: {error}") from error
    old.pop("fastbcd", None)  # which version began it does not matter
    for name, before, now in differences(old, config):
        raise ValueError(
            f"{path} holds another run: {name} is {before} there and {now} now; "
            f"name another run_dir, or go on with what is there"
        )


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, old value, new value) wherever two JSON values differ.

    >>> list(differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}))
    [('a.b', '1', '3')]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            inner = f"{name}.{key}" if name else key
            yield from differences(old.get(key, MISSING), new.get(key, MISSING), inner)
    elif old != new:
        before, now = (v if v is MISSING else json.dumps(v, ensure_ascii=False) for v in (old, new))
        yield name, before, now


def _locked(path: Path) -> int:
    """A lock on the directory for as long as the descriptor is open, also after a kill."""
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


def _line(record: dict[str, Any]) -> bytes:
    return (_json(record) + "\n").encode()


def _json(value: Any) -> str:
    """As JSON; numbers may be NumPy's."""
    return json.dumps(value, default=lambda number: number.item())


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))
