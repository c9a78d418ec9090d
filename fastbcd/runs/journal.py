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

from torch import Tensor, nn

from fastbcd.masking.masks import masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.config import Config, as_json
from fastbcd.runs.directory import RunDirectory, State, read_start
from fastbcd.runs.step import Epoch, Start, Step, decode, encode
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import keep_mode
from fastbcd.runtime.show import say
from fastbcd.runtime.validate import check_choice

Record = TypeVar("Record", Step, Epoch)
Tensors = dict[str, Tensor]
EXTRA = "extra/"  # prefix of the tensors that are not the net's, in a state
RESUME = ("auto", "must", "never", True, False)


class Journal(Generic[Record]):
    """What a run has done.

    start: the facts about the net before the first step. history: one record per finished step.
    extra: the tensors that were saved beside those of the net with the last one.
    """

    def __init__(
        self,
        net: nn.Module,
        over: Callable[[list[Record]], bool],
        directory: RunDirectory | None,
    ) -> None:
        self.net = net
        self.over: Callable[[list[Record]], bool] = over
        self.start = Start()
        self.history: list[Record] = []
        self.extra: Tensors = {}
        self._directory = directory  # rank 0's
        self._good: Tensors = {}  # the net after the last finished step

    def begin(self, start: Start) -> None:
        """Keep the net as it is before the first step."""
        self.start = start
        self._save([], {})

    def finish(self, record: Record, extra: Tensors | None = None) -> None:
        """Make `record` the last finished step: the net is kept as it is now.

        extra: tensors that the next step needs beside those of the net.
        """
        self.check_finite()
        history = list(self.history)
        history.append(record)
        self._save(history, extra or {})

    def undo(self) -> None:
        """Make the net what it was after the last finished step."""
        if self._good:
            snapshots.restore(self.net, self._good)

    def resume(self, state: State, kind: type[Record]) -> None:
        """Make the net and this journal what they were when the state was saved."""
        self.start = decode(Start, state.start, "the saved state")
        self.history = [
            decode(kind, record, "the saved state") for record in state.history
        ]
        for name, tensor in state.tensors.items():
            if name.startswith(EXTRA):
                self.extra[name.removeprefix(EXTRA)] = tensor
            else:
                self._good[name] = tensor
        self.undo()

    def start_tensors(self) -> Tensors:
        """The net's tensors before the first step."""
        if not self.history:
            return self._good
        return ranks.on_first(self._read_start)

    def check_finite(self) -> None:
        """Refuse weights that have become infinite or NaN since the last finished step."""
        for name, tensor in snapshots.tensors_of(self.net).items():
            if not tensor.isfinite().all() and self._good[name].isfinite().all():
                raise FloatingPointError(
                    f"{name} is not finite after step {len(self.history) + 1}, which is undone: "
                    f"train with a smaller learning rate, or limit the norm of the gradient"
                )

    def _save(self, history: list[Record], extra: Tensors) -> None:
        net = snapshots.take(self.net)
        ranks.check_same("the weights and masks", net)
        state = State(
            tensors=net | {EXTRA + name: tensor for name, tensor in extra.items()},
            start=encode(self.start),
            history=[encode(record) for record in history],
            done=self.over(history),
        )
        ranks.on_first(lambda: self._write(state))
        self.history = history
        self.extra = extra
        self._good = net

    def _write(self, state: State) -> None:
        if self._directory is not None:
            self._directory.write(state)

    def _read_start(self) -> Tensors:
        state = None if self._directory is None else read_start(self._directory.path)
        return {} if state is None else state.tensors


@contextmanager
def journal(
    config: Config,
    net: nn.Module,
    kind: type[Record],
    *,
    begin: Callable[[], Start],
    over: Callable[[list[Record]], bool],
    run_dir: str | os.PathLike[str] | None,
    resume: Any,
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
    check_choice("resume", resume, RESUME)
    how = {True: "must", False: "never"}.get(resume, resume)
    facts = {"config": config, "run_dir": str(run_dir), **(same or {})}
    ranks.check_facts(json.loads(as_json(facts)))
    with ExitStack() as stack:
        directory: RunDirectory | None = None
        state: State | None = None

        def open_directory() -> State | None:
            nonlocal directory
            directory = RunDirectory(Path(run_dir or "."), config, how)
            stack.callback(directory.close)
            return directory.newest()

        if run_dir is not None:
            state = ranks.on_first(open_directory)
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


def _announce(run: Journal[Any], run_dir: Any) -> None:
    """Say that a run is resumed, or that nothing is left to do."""
    steps = len(run.history)
    kept = f"{masks(run.net).count():,} ReLUs kept"
    where = "" if run_dir is None else f" in {run_dir}"
    if run.over(run.history):
        say(f"the run{where} is done: {steps} steps, {kept}")
    elif steps:
        say(f"resuming the run{where} after step {steps}, {kept}")
