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

from fastbcd.runs.config import KINDS, check_record, differences, parse, version
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


class Progress(NamedTuple):
    """How far a run is: start, newest state, records, and the digest that the next step names."""

    start: State
    state: State
    records: list[dict[str, Any]]
    digest: str


# ------------------------------------------------------------------------------- one state


def state_bytes(state: State) -> bytes:
    """A state as the bytes of its file."""
    about = _about(state)
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
    about = {key: metadata[key] for key in ("step", "record", "previous") if key in metadata}
    expected = {"format": "fastbcd.state", **about, "sha256": _checksum(tensors, about)}
    if metadata != expected or not {"step", "record"} <= about.keys():
        raise ValueError(f"{path} is damaged: its contents do not match their SHA-256")
    record = parse(about["record"].encode(), f"{path}: record")
    return State(int(about["step"]), tensors, record, about.get("previous"))


def state_digest(state: State) -> str:
    """The SHA-256 that the state's file holds."""
    return _checksum(state.tensors, _about(state))


def newest_state(folder: Path) -> State | None:
    """The newest state; if it is damaged, an error that names the newest one that is not."""
    present = [folder / name for name in STATES if (folder / name).exists()]
    for path in present[:1]:
        try:
            return read_state(path)
        except ValueError as error:
            raise ValueError(f"{error}. {_way_out(path, present[1:])}") from error
    return None


def _about(state: State) -> dict[str, str]:
    about = {"step": str(state.step), "record": as_json(state.record)}
    return about if state.previous is None else {**about, "previous": state.previous}


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
            f"The state of step {step}, {path.name}, is intact: move {damaged.name} away and start "
            f"again to resume from it"
        )
    return "No intact state is left beside it: begin again in another directory"


# ------------------------------------------------------------------------------- the history


def history_line(record: dict[str, Any], digest: str | None) -> bytes:
    """A record as a line of history.jsonl; digest: `line_digest`, None in version 1."""
    return (as_json(record if digest is None else {**record, "digest": digest}) + "\n").encode()


def line_digest(previous: str, record: dict[str, Any]) -> str:
    """The digest of a line that follows the one of digest `previous`."""
    return hashlib.sha256(f"{previous} {as_json(record)}".encode()).hexdigest()


def read_progress(folder: Path, config: dict[str, Any]) -> Progress | None:
    """The newest state and the records that lead to it, checked; None if nothing was saved yet.

    A kill may leave the history one record behind the state, or with half a line at its end: the
    record is taken from the state. Lines after the state's step are left out.
    """
    kind = KINDS[config["format"].rpartition(" ")[0]]
    state = newest_state(folder)
    if state is None:
        return None
    # Read after the state: it is never behind it by more than one record.
    path = folder / "history.jsonl"
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")[:-1]
    start = _start(folder, state)
    digests = []
    if version(config) > 1:
        if start.previous != config_digest(folder):
            raise ValueError(
                f"{folder / STATES[-1]}: previous is not the digest of config.json: {OTHER_RUN}"
            )
        digests = [state_digest(start)]
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        record = parse(line, where)
        digest = record.pop("digest", None) if isinstance(record, dict) else None
        check_record(record, kind, where)
        if record["number"] != number:
            raise ValueError(f"{where}: number is {record['number']}, expected {number}")
        if digests:
            expected = line_digest(digests[-1], record)
            if digest != expected or line + b"\n" != history_line(record, digest):
                raise ValueError(f"{where}: digest does not match the line: {OTHER_RUN}")
            digests.append(expected)
        records.append(record)
    if len(records) == state.step - 1:
        records.append(state.record)
        digests += [line_digest(digests[-1], state.record)] if digests else []
    if len(records) < state.step:
        raise ValueError(
            f"{path} has {len(records)} of the {state.step} records that the state has behind it; "
            f"put the file back, or begin again from these weights in another directory"
        )
    _check_state(folder, state, records, digests)
    return Progress(start, state, records[: state.step], digests[state.step] if digests else "")


def _start(folder: Path, newest: State) -> State:
    path = folder / STATES[-1]
    if newest.step and not path.exists():
        raise FileNotFoundError(f"{path} is missing: put it back; it is where the run began")
    return read_state(path) if newest.step else newest


def config_digest(folder: Path) -> str:
    """The SHA-256 of config.json."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def _check_state(
    folder: Path, state: State, records: list[dict[str, Any]], digests: list[str]
) -> None:
    """Refuse a state that does not follow the history."""
    if not state.step:
        return
    path = next(folder / name for name in STATES if (folder / name).exists())
    if digests and state.previous != digests[state.step - 1]:
        raise ValueError(
            f"{path}: previous is not the digest of step {state.step - 1} in history.jsonl: "
            f"{OTHER_RUN}"
        )
    ours, theirs = (_without_save(r) for r in (state.record, records[state.step - 1]))
    for name, mine, other in differences(ours, theirs):
        raise ValueError(
            f"{path}: record: {name} is {mine} and {other} in line {state.step} of history.jsonl: "
            f"{OTHER_RUN}"
        )


def _without_save(record: dict[str, Any]) -> dict[str, Any]:
    """The time that saving took is known only after the state is written."""
    seconds = {k: v for k, v in record.get("seconds", {}).items() if k != "save"}
    return {**record, "seconds": seconds}


def as_json(value: Any) -> str:
    """As JSON; numbers may be NumPy's."""
    return json.dumps(value, default=lambda number: number.item())
