"""A small run with real fine-tuning, and children that are killed while they do it.

`python tests/run_cases.py FOLDER` starts them by fork from one process that has torch imported,
and prints what it found as JSON; tests/runs/test_directory.py reads that.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import fastbcd
from fastbcd.runs.files import read_state
from fastbcd.training.settings import Finetune


def small_net() -> nn.Module:
    """28×28 images, 10 classes, 98 ReLUs; with batch norm and dropout, the same every time."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, 4, 2), nn.BatchNorm2d(2), fastbcd.MaskedReLU((2, 7, 7)), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(98, 10),
    )  # fmt: skip


def small_run(run_dir: Path | None, **options: Any) -> fastbcd.Run:
    """Five steps, each fine-tuned for an epoch."""
    data = fastbcd.load("fashion-mnist-mini").first(48)
    settings: dict[str, Any] = {
        "budget": 8, "drc": 20, "rt": 3, "adt": 1.0, "test": data.first(20),
        "finetune": Finetune(epochs=1, batch_size=16, lr=0.05), "run_dir": run_dir,
    }  # fmt: skip
    return fastbcd.bcd(small_net(), data, **{**settings, **options})


def contents(run_dir: Path) -> tuple[Any, Any]:
    """What two runs must have in common: the state's tensors and the history without seconds."""
    state = read_state(run_dir / "state.safetensors")
    tensors = {name: t.tolist() for name, t in sorted(state.tensors.items())}
    return tensors, [{**record, "seconds": None} for record in records(run_dir)]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The history as its file has it, without the digests: those cover the seconds."""
    lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "digest"} for line in lines]


def fork(work: Callable[[], object]) -> int:
    """A child that does the work; exit code 0 if all went well."""
    # tqdm's own lock is one for all forks: a child killed while it holds it would stop the rest.
    tqdm.set_lock(threading.RLock())
    pid = os.fork()
    if not pid:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def ends_well(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


def random_kills(folder: Path, wanted: int = 16) -> dict[str, Any]:
    """Runs that are killed at random moments and started again until they are done."""
    begin = time.perf_counter()
    assert ends_well(fork(lambda: small_run(folder / "whole")))
    length = time.perf_counter() - begin
    expected, kills, done, steps, rng = contents(folder / "whole"), 0, 0, set(), random.Random(5)
    while kills < wanted:
        run_dir = folder / f"run{done}"
        while True:
            pid = fork(lambda run_dir=run_dir: small_run(run_dir))
            time.sleep(rng.uniform(0.05, 0.8) * length)
            os.kill(pid, signal.SIGKILL)
            if ends_well(pid):
                break
            kills += 1
            if (run_dir / "state.safetensors").exists():
                steps.add(read_state(run_dir / "state.safetensors").step)
            length *= 1.02  # so that there is an end to it
        assert contents(run_dir) == expected, f"{run_dir} after {kills} kills"
        done += 1
    return {"kills": kills, "runs": done, "steps": sorted(steps)}


class Dying:
    """Kills this process right before its n-th call that reaches the disk.

    Those are renames, syncs, removals, new folders, and both halves of everything that is written:
    before the first the file is there and empty, before the second it is cut short.
    """

    def __init__(self, n: int) -> None:
        self.left = n

    def tick(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.tick()
            return function(*arguments, **options)

        return call

    def opened(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        file = real_open(path, mode, *rest, **options)
        if set(mode) & set("wax+"):
            write = file.write

            def halves(content: Any) -> int:
                for half in (content[: len(content) // 2], content[len(content) // 2 :]):
                    self.tick()
                    write(half)
                    file.flush()
                return len(content)

            return Written(file, halves)
        return file

    def watch(self) -> None:
        """From now on, in this process."""
        for name in ("replace", "rename", "fsync", "unlink", "remove", "mkdir"):
            setattr(os, name, self.counted(getattr(os, name)))
        builtins.open = io.open = self.opened


class Written:
    """A file whose `write` is another."""

    def __init__(self, file: Any, write: Callable[[Any], int]) -> None:
        self.file, self.write = file, write

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def nudge(net: nn.Module, step: fastbcd.Step) -> None:
    """A training that takes no time; torch's generator is seeded by the step."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


real_open = io.open
SHORT = {"budget": 38, "finetune": nudge}  # three steps


def kills_everywhere(folder: Path, begin: Callable[[Path], object]) -> dict[str, Any]:
    """A kill right before the n-th call that reaches the disk, for every n there is.

    begin: makes the directory that the run, which is to be killed, finds.
    """
    assert ends_well(fork(lambda: small_run(folder / "whole", **SHORT)))
    expected = contents(folder / "whole")
    for n in count(1):
        run_dir = folder / f"call{n}"
        begin(run_dir)

        def dying(run_dir: Path = run_dir, n: int = n) -> None:
            Dying(n).watch()
            small_run(run_dir, **SHORT)

        if ends_well(fork(dying)):
            return {"operations": n - 1}
        assert ends_well(fork(lambda run_dir=run_dir: small_run(run_dir, **SHORT))), f"call {n}"
        assert contents(run_dir) == expected, f"killed before call {n}"
    raise AssertionError


def kills_at_operations(folder: Path) -> dict[str, Any]:
    """From the beginning to the end of a run."""
    return kills_everywhere(folder, lambda run_dir: None)


def kills_while_mending(folder: Path) -> dict[str, Any]:
    """A run that was killed while it wrote the last line of its history is killed once more."""

    def cut_short(run_dir: Path) -> None:
        shutil.copytree(folder / "whole", run_dir)
        history = run_dir / "history.jsonl"
        history.write_bytes(history.read_bytes()[:-20])

    return kills_everywhere(folder, cut_short)


def limited(folder: Path) -> dict[str, Any]:
    """While step 2 is written no file may grow beyond 1,000 bytes; later it may."""
    room = [1000]

    def train(net: nn.Module, step: fastbcd.Step) -> None:
        if step.number == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room[0], resource.RLIM_INFINITY))

    def child() -> None:
        try:
            small_run(folder / "run", finetune=train)
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            (folder / "error").write_text(str(error))

    assert ends_well(fork(child))
    stands = read_state(folder / "run" / "state.safetensors").step
    room[0] = 10**9
    assert ends_well(fork(child))
    done = read_state(folder / "run" / "state.safetensors").step
    return {"error": (folder / "error").read_text(), "stands": stands, "done": done}


def attempt(case: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    try:
        return case(folder)
    except AssertionError:
        return {"failed": traceback.format_exc()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    small_run(None)  # imports what is imported late, once for all children
    cases = {
        "random": random_kills, "operations": kills_at_operations, "mending": kills_while_mending,
        "limit": limited,
    }  # fmt: skip
    print(json.dumps({k: attempt(case, Path(sys.argv[1]) / k) for k, case in cases.items()}))
