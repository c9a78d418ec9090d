"""Run directories: what is on disk between two steps, so that a run survives a kill at any moment.

    config.json                   the settings, the net and the data
    start.safetensors             the state before the first step
    state.safetensors             the state after the last finished step, with that step's record
    state.previous.safetensors    the state before that
    history.jsonl                 one record per step

A step is finished when state.safetensors holds it; the history is appended to afterwards, and on
opening it is brought in line with the state. So the process may be killed between any two
operations. How the files are bound to each other and checked is in files.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.runs import files
from fastbcd.runs.config import check_same_config, version
from fastbcd.runs.files import OWN, State, as_json
from fastbcd.runs.fingerprint import run_config
from fastbcd.runtime import ranks
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

RESUME = {"auto": "auto", "must": "must", "never": "never", True: "must", False: "never"}
# What a process that was killed while it wrote one of these files leaves behind.
_LEFTOVER = re.compile(rf"\.({'|'.join(map(re.escape, OWN))})\.\d+\.tmp")


class RunDirectory:
    """A run on disk, open and locked by rank 0; every rank gets the same state.

    path: None for a run whose history is kept in memory only. config: made by
    `fingerprint.run_config`; a directory of another run is refused. resume: as in `bcd`.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, config: dict[str, Any], resume: Any
    ) -> None:
        self.path, self.on_disk = Path(path or ""), path is not None
        self.state: State | None = None
        self.start: dict[str, Any] = {}  # the record of the state before the first step
        self.history: list[dict[str, Any]] = []
        self._lock = -1
        self._digest: str | None = None  # of the step before the next one; None in version 1
        if not self.on_disk:
            return
        config = json.loads(as_json(config))  # tuples become lists, as they do on disk
        tensors: dict[str, Tensor] = {}  # read by rank 0
        opened = ranks.on_first(lambda: self._open(config, check_resume(resume), tensors))
        found = json.loads(opened)
        self.start, self.history = found["start"], found["history"]
        for name, (dtype, shape) in found["tensors"].items():
            if ranks.rank():
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            tensors[name] = ranks.from_first(tensors[name])
        if found["step"] is not None:
            self.state = State(found["step"], tensors, found["record"])

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Make `step` the last finished one. Step 0 is the start."""
        if self.on_disk:
            ranks.on_first(lambda: self._save(step, tensors, record))
        if step:
            self.history.append(record)

    def close(self) -> None:
        """Let others open the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ------------------------------------------------------------------ rank 0 alone

    def _open(self, config: dict[str, Any], resume: str, tensors: dict[str, Tensor]) -> str:
        """Lock the directory, fill in the tensors of its state and return the rest as JSON."""
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run_dir {self.path} is a file; name a directory")
        if resume == "must" and not (self.path / "config.json").exists():
            raise FileNotFoundError(
                f"there is no run in {self.path} to resume: config.json is missing; "
                f"resume='auto' would begin one"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path)
        try:
            progress = self._read(config, resume)
        except BaseException:
            self.close()
            raise
        found: dict[str, Any] = {"step": None, "tensors": {}, "start": {}, "history": []}
        if progress is not None:
            state = progress.state
            tensors.update(state.tensors)
            found |= {"step": state.step, "record": state.record}
            found |= {"start": progress.start.record, "history": progress.records}
            found["tensors"] = {k: [str(t.dtype)[6:], list(t.shape)] for k, t in tensors.items()}
        return json.dumps(found)

    def _read(self, config: dict[str, Any], resume: str) -> files.Progress | None:
        """Write config.json or check it, and bring the history in line with the state."""
        names = sorted(p.name for p in self.path.iterdir() if p.name != ".lock")
        leftovers = [name for name in names if _LEFTOVER.fullmatch(name)]
        present = [name for name in names if name not in leftovers]
        if resume == "never" and present:
            raise FileExistsError(
                f"run_dir {self.path} is not empty (it holds {present[0]}); name another "
                f"directory, or resume the run there: resume='auto'"
            )
        if "config.json" not in present:
            if stray := [name for name in present if name in OWN]:
                raise ValueError(
                    f"{self.path} holds {stray[0]} but no config.json, so it is not known which "
                    f"run that belongs to; name another directory"
                )
            written = {"fastbcd": __version__, **config}
            text = json.dumps(written, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.path / "config.json", lambda file: file.write(text.encode()))
        old = check_same_config(self.path, config)
        progress = files.read_progress(self.path, old)
        for name in leftovers:
            (self.path / name).unlink(missing_ok=True)
        if chained := version(old) > 1:
            self._digest = progress.digests[-1] if progress else files.config_digest(self.path)
        if progress is None:
            return None
        records, path = progress.records, self.path / "history.jsonl"
        digests = progress.digests[1:] if chained else [None] * len(records)
        new = b"".join(map(files.history_line, records, digests))
        if new != (path.read_bytes() if path.exists() else b""):
            write_atomically(path, lambda file: file.write(new))
        return progress

    def _save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> str:
        begin = time.perf_counter()
        path = self.path / ("state.safetensors" if step else "start.safetensors")
        keep = self.path / "state.previous.safetensors" if step else None
        try:
            state = State(step, tensors, record, self._digest)
            content = files.state_bytes(state)
            write_atomically(path, lambda file: file.write(content), keep)
            if not step:
                self._digest = self._digest and state.metadata()["sha256"]
                return ""
            record.setdefault("seconds", {})["save"] = time.perf_counter() - begin
            self._digest = self._digest and files.line_digest(self._digest, record)
            with open(self.path / "history.jsonl", "ab") as file:
                file.write(files.history_line(record, self._digest))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno,
                f"step {step} could not be written into the run directory {self.path}: "
                f"{error.strerror}; the steps before it are intact: free some space (or correct "
                f"the permissions) and start the same command again",
            ) from error
        return ""


def open_run(
    kind: str, settings: dict[str, Any], net: nn.Module, *, resume: str | bool,
    run_dir: str | os.PathLike[str] | None, engine: object = None, **facts: Any,
) -> RunDirectory:  # fmt: skip
    """Begin or resume a run; all ranks must give the same arguments. facts: of `run_config`."""
    config = run_config(kind, settings, net, **facts)
    if ranks.world() > 1:
        same = {"settings": settings, "run_dir": str(run_dir), "engine": repr(engine)}
        for name in ("data", "test"):
            for part in ("labels", "images") if facts[name] is not None else ():
                mark = ranks.digest({part: getattr(facts[name], part)}).hex()
                same[f"the digest of {name}.{part}"] = mark[:16]
        ranks.check_facts(json.loads(as_json({**same, **config})))
    return RunDirectory(run_dir, config, resume)


def check_resume(resume: Any) -> str:
    """One of "auto", "must", "never"."""
    if not isinstance(resume, str | bool) or resume not in RESUME:
        raise ValueError(f"resume={resume!r}; choose from 'auto', 'must' (True), 'never' (False)")
    return RESUME[resume]


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
