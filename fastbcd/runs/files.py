"""The files of a run: states and history, each bound to the one before it by a digest.

    config.json ◀─ start.safetensors ◀─ line 1 of history.jsonl ◀─ line 2 ◀─ …
                                         state n names line n - 1 and holds the record of line n

A state is a safetensors file whose metadata holds the step, its record, the digest of what came
before it and a SHA-256 of all that. A line of the history is a record and the SHA-256 of the line
before it and itself. So an edited word, a flipped bit, a line that is missing or in another place
and a file of another run are found on reading. Runs of version 1 have no digests between files:
only the SHA-256 of each state is checked, and that its record is in the history.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastbcd.runs.config import KINDS, check_record, differences, kind_of, parse, version
from fastbcd.runtime import ranks

STATES = ("state.safetensors", "state.previous.safetensors", "start.safetensors")
OWN = ("config.json", "history.jsonl", *STATES)
OTHER_RUN = "the file was edited or belongs to another run; put the original file back"


class State(NamedTuple):
    """The tensors after `step` finished steps; `record` is the last step's, {} before the first."""

    step: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]
    previous: str | None = None  # the digest of what came before; None in version 1

    def metadata(self) -> dict[str, str]:
        """What its file holds beside the tensors; "sha256" is its digest."""
        about = {"step": str(self.step), "record": as_json(self.record)}
        about |= {} if self.previous is None else {"previous": self.previous}
        text = json.dumps(about, sort_keys=True).encode()
        digest = hashlib.sha256(ranks.digest(self.tensors) + text).hexdigest()
        return {"format": "fastbcd.state", **about, "sha256": digest}


class Progress(NamedTuple):
    """How far a run is: the records of its steps, and the digests of its start and its steps."""

    start: State
    state: State
    records: list[dict[str, Any]]
    digests: list[str]


def state_bytes(state: State) -> bytes:
    """A state as the bytes of its file."""
    return save(state.tensors, state.metadata())


def read_state(path: Path) -> State:
    """What `state_bytes` made; ValueError if any of it was changed or is missing."""
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(found["record"])
        state = State(int(found["step"]), tensors, record, found.get("previous"))
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if found != state.metadata():
        raise ValueError(f"{path} is damaged: its contents do not match their SHA-256")
    return state


def newest_state(folder: Path) -> State | None:
    """The newest state; if it is damaged, an error that names the newest one that is not."""
    damaged: dict[str, ValueError] = {}
    state = None
    for path in (folder / name for name in STATES if (folder / name).exists()):
        try:
            state = read_state(path)
            break
        except ValueError as error:
            damaged[path.name] = error
    for first in damaged.values():
        way_out = "No intact state is left beside it: begin again in another directory"
        if state is not None:
            way_out = f"The state of step {state.step}, {path.name}, is intact: move "
            way_out += f"{', '.join(damaged)} away and start again to resume from it"
        raise ValueError(f"{first}. {way_out}") from first
    return state


def history_line(record: dict[str, Any], digest: str | None) -> bytes:
    """A record as a line of history.jsonl; digest: `line_digest`, None in version 1."""
    return (as_json(record if digest is None else {**record, "digest": digest}) + "\n").encode()


def line_digest(previous: str, record: dict[str, Any]) -> str:
    """The digest of a line that follows the one of digest `previous`."""
    return hashlib.sha256(f"{previous} {as_json(record)}".encode()).hexdigest()


def read_progress(folder: Path, config: dict[str, Any]) -> Progress | None:
    """The newest state and the records that lead to it, checked; None if nothing was saved yet.

    After a kill the history may lack the last record, which is taken from the state.
    """
    state = newest_state(folder)
    if state is None:
        return None
    first, path = folder / "start.safetensors", folder / "history.jsonl"
    if state.step and not first.exists():
        raise FileNotFoundError(f"{first} is missing: put it back; it is where the run began")
    start, step = read_state(first) if state.step else state, state.step
    chained, digests = version(config) > 1, [start.metadata()["sha256"]]
    if chained and start.previous != config_digest(folder):
        raise ValueError(f"{first}: previous is not the digest of config.json: {OTHER_RUN}")
    # Read after the state: the history is never behind it by more than one record.
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")[:-1]
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        record = parse(line, where)
        if isinstance(record, dict):
            record.pop("digest", None)
        check_record(record, KINDS[kind_of(config)], where)
        if record["number"] != number:
            raise ValueError(f"{where}: number is {record['number']}, expected {number}")
        records.append(record)
        digests.append(line_digest(digests[-1], record))
        if chained and line + b"\n" != history_line(record, digests[-1]):
            raise ValueError(f"{where}: digest does not match the line: {OTHER_RUN}")
    if len(records) == step - 1:
        records.append(state.record)
        digests.append(line_digest(digests[-1], state.record))
    if len(records) < step:
        raise ValueError(
            f"{path} has {len(records)} of the {step} records that the state has behind it; put "
            f"the file back, or begin again from these weights in another directory"
        )
    if step:
        newest, wrong = next(p for name in STATES if (p := folder / name).exists()), ""
        if chained and state.previous != digests[step - 1]:
            wrong = f"previous is not the digest of step {step - 1} in history.jsonl"
        ours, theirs = (_without_save(r) for r in (state.record, records[step - 1]))
        for name, mine, other in differences(ours, theirs):
            wrong = wrong or f"record: {name} is {mine} and {other} in line {step} of history.jsonl"
        if wrong:
            raise ValueError(f"{newest}: {wrong}: {OTHER_RUN}")
    return Progress(start, state, records[:step], digests[: step + 1])


def config_digest(folder: Path) -> str:
    """The SHA-256 of config.json."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def _without_save(record: dict[str, Any]) -> dict[str, Any]:
    """The time that saving took is known only after the state is written."""
    seconds = {k: v for k, v in record.get("seconds", {}).items() if k != "save"}
    return {**record, "seconds": seconds}


def as_json(value: Any) -> str:
    """As JSON; numbers may be NumPy's."""
    return json.dumps(value, default=lambda number: number.item())
