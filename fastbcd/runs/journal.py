"""The journal of a run: what has happened so far. Nothing else of a run changes.

    with journal(config, net, Step, begin=..., over=..., run_dir="runs/15k", resume="auto") as run:
        for step in ...:          # changes the net
            run.finish(step)      # checked on all ranks, on disk, in run.history

Every method uses it: `bcd`, `steps`, `linearize`, `train` and the starting points. It locks the run
directory, compares config.json, and restores the net as it was after the last finished step. After
an exception the net is as it was then, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fastbcd.masking.masks import MaskSet, masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.config import Config, as_json, read_config
from fastbcd.runs.directory import RunDirectory, State, masks_in, read_start, read_state
from fastbcd.runs.step import Epoch, Start, Step, decode, encode
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import keep_mode
from fastbcd.runtime.show import say

Record = TypeVar("Record", Step, Epoch)
Tensors = dict[str, Tensor]
EXTRA = "extra/"  # prefix of the tensors that are not the net's, in a state
RESUME = {"auto": "auto", "must": "must", "never": "never", True: "must", False: "never"}


class Journal(Generic[Record]):
    """What a run has done.

    start: the facts about the net before the first step. history: one record per finished step.
    extra: the tensors that were saved beside those of the net with the last one.
    """

    def __init__(
        self, net: nn.Module, over: Callable[[list[Record]], bool], directory: RunDirectory | None
    ) -> None:
        self.net = net
        self.over: Callable[[list[Record]], bool] = over
        self.start = Start()
        self.history: list[Record] = []
        self.extra: Tensors = {}
        self._directory = directory  # rank 0's
        self._good: Tensors = {}  # the net after the last finished step

    def finish(self, record: Record, extra: Tensors | None = None) -> None:
        """Make `record` the last finished step: the net is kept as it is now.

        extra: tensors that the next step needs beside those of the net.
        """
        history = list(self.history)
        history.append(record)
        self._save(history, extra or {})
        self.history = history

    def begin(self, start: Start) -> None:
        """Keep the net as it is before the first step."""
        self.start = start
        self._save([], {})

    def resume(self, state: State, kind: type[Record]) -> None:
        """Make the net and this journal what they were when the state was saved."""
        where = "the saved state"
        self.start = decode(Start, state.start, where)
        self.history = [decode(kind, record, where) for record in state.history]
        for name, tensor in state.tensors.items():
            if name.startswith(EXTRA):
                self.extra[name.removeprefix(EXTRA)] = tensor
            else:
                self._good[name] = tensor
        self.undo()

    def start_tensors(self) -> Tensors:
        """The net's tensors before the first step; of a run that was resumed, from its file."""
        path = None if self._directory is None else self._directory.path
        state: State | None = None

        def read() -> str:
            nonlocal state
            if path is not None:
                state = read_start(path)
            return _without_tensors(state)

        facts = json.loads(ranks.on_first(read))
        state = _sent(facts, state)
        if state is None:
            return self._good
        return state.tensors

    def undo(self) -> None:
        """Make the net what it was after the last finished step."""
        if self._good:
            snapshots.restore(self.net, self._good)

    def _save(self, history: list[Record], extra: Tensors) -> None:
        tensors = snapshots.take(self.net)
        ranks.check_same("the weights and masks", tensors)
        records = [encode(record) for record in history]
        over = self.over(history)
        more = {EXTRA + name: tensor for name, tensor in extra.items()}
        state = State(tensors | more, encode(self.start), records, over)
        ranks.on_first(lambda: self._write(state))
        self._good = tensors
        self.extra = extra

    def _write(self, state: State) -> str:
        if self._directory is not None:
            self._directory.write(state)
        return ""


@contextmanager
def journal(
    config: Config,
    net: nn.Module,
    kind: type[Record],
    *,
    begin: Callable[[], Start],
    over: Callable[[list[Record]], bool],
    run_dir: str | os.PathLike[str] | None,
    resume: str | bool,
    same: dict[str, str] | None = None,
) -> Iterator[Journal[Record]]:
    """Begin or resume a run; all ranks give the same arguments.

    Args:
        config: what the run is. kind: of its records.
        begin: the facts about the start, called once the run is known to be a new one.
        over: whether a run with this history is finished, asked of the net as it is then.
        run_dir: where to save; None: in memory only. resume: as in `bcd`.
        same: what ranks must have in common beside the config.
    """
    how = check_resume(resume)
    facts = {"config": config, "run_dir": str(run_dir), **(same or {})}
    ranks.check_facts(json.loads(as_json(facts)))
    with ExitStack() as stack:
        directory, state = _opened(stack, run_dir, config, how)
        run = Journal(net, over, directory)
        stack.enter_context(keep_mode(net))
        if state is None:
            run.begin(begin())
        else:
            run.resume(state, kind)
        _announce(run, run_dir)
        try:
            yield run
        except BaseException:
            run.undo()
            raise


def peek(config: Config, run_dir: Path, kind: type[Record]) -> tuple[list[Record], MaskSet] | None:
    """The history and the masks of a run, if it has begun; nothing is locked or written."""
    if not (run_dir / "config.json").exists():
        return None
    config.check_same(read_config(run_dir), run_dir)
    state = read_state(run_dir)
    if state is None:
        return None
    history = [decode(kind, record, str(run_dir)) for record in state.history]
    return history, masks_in(state.tensors, config.net.sites, str(run_dir))


def check_resume(resume: Any) -> str:
    """One of "auto", "must", "never"."""
    if not isinstance(resume, str | bool) or resume not in RESUME:
        raise ValueError(f"resume={resume!r}; choose from 'auto', 'must' (True), 'never' (False)")
    return RESUME[resume]


def _opened(
    stack: ExitStack, run_dir: Any, config: Config, resume: str
) -> tuple[RunDirectory | None, State | None]:
    """Rank 0's directory until the stack is left, and on all ranks the state in it."""
    if run_dir is None:
        return None, None
    directory: RunDirectory | None = None
    state: State | None = None

    def open_directory() -> str:
        nonlocal directory, state
        directory = RunDirectory(Path(run_dir), config, resume)
        stack.callback(directory.close)
        state = directory.newest()
        return _without_tensors(state)

    facts = json.loads(ranks.on_first(open_directory))
    return directory, _sent(facts, state)


def _without_tensors(state: State | None) -> str:
    """A state as text, with dtypes and shapes in place of its tensors."""
    if state is None:
        return "null"
    shapes = {name: [str(t.dtype)[6:], list(t.shape)] for name, t in state.tensors.items()}
    return json.dumps(state._replace(tensors=shapes)._asdict())  # type: ignore[arg-type]


def _sent(facts: Any, state: State | None) -> State | None:
    """Rank 0's state on every rank; facts: of `_without_tensors`."""
    if facts is None:
        return None
    tensors: Tensors = {}
    for name, (dtype, shape) in facts["tensors"].items():
        if state is None:  # not rank 0
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        else:
            tensor = state.tensors[name]
        tensors[name] = ranks.from_first(tensor)
    return State(tensors, facts["start"], facts["history"], facts["done"])


def _announce(run: Journal[Any], run_dir: Any) -> None:
    """Say that a run is resumed, or that nothing is left to do."""
    steps = len(run.history)
    kept = f"{masks(run.net).count():,} ReLUs kept"
    where = "" if run_dir is None else f" in {run_dir}"
    if run.over(run.history):
        say(f"the run{where} is done: {steps} steps, {kept}")
    elif steps:
        say(f"resuming the run{where} after step {steps}, {kept}")
