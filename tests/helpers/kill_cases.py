"""Children that are killed with SIGKILL while they work, started by fork from one process.

`python tests/helpers/kill_cases.py FOLDER KILLS SECONDS` kills children KILLS times, or for SECONDS
seconds if that takes longer, and prints what it found as JSON; see tests/hostile/test_kills.py.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import fastbcd
from fastbcd.runs.directory import read_state
from helpers.run_cases import contents, small_run


def fork(work: Callable[[], object]) -> int:
    """A child that does the work; exit code 0 if there was no error."""
    # tqdm's own lock is shared by forks: a child killed while it holds it would stop the others.
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


def succeeds(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


def finished_steps(run_dir: Path) -> int:
    path = run_dir / "history.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_storm(folder: Path, kills: int, seconds: float) -> dict[str, Any]:
    """Runs that are killed up to five times, each time some moments after a step of some number."""
    assert succeeds(fork(lambda: small_run(folder / "whole")))
    expected, rng, begin = contents(folder / "whole"), random.Random(5), time.monotonic()
    done, runs = 0, 0
    while done < kills or time.monotonic() - begin < seconds:
        run_dir = folder / f"run{runs}"
        for _ in range(rng.randint(1, 5)):
            pid = fork(lambda run_dir=run_dir: small_run(run_dir))
            after = rng.randint(0, 5)
            while finished_steps(run_dir) < after and not os.waitid(
                os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            ):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            done += not succeeds(pid)
        assert succeeds(fork(lambda run_dir=run_dir: small_run(run_dir))), f"{run_dir}"
        assert contents(run_dir) == expected, f"{run_dir} after {done} kills"
        runs += 1
    return {"kills": done, "runs": runs}


def limited(folder: Path) -> dict[str, Any]:
    """While step 2 is written no file may grow beyond 1,000 bytes; in the second call it may."""
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

    assert succeeds(fork(child))
    before = len(read_state(folder / "run").history)
    room[0] = 10**9
    assert succeeds(fork(child))
    after = len(read_state(folder / "run").history)
    return {"error": (folder / "error").read_text(), "before": before, "after": after}


def attempt(case: Callable[..., dict[str, Any]], folder: Path, *arguments: Any) -> dict[str, Any]:
    folder.mkdir()
    try:
        return case(folder, *arguments)
    except AssertionError:
        return {"failed": traceback.format_exc()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    small_run(None)  # imports what is imported late, once for all children
    found = {
        "storm": attempt(kill_storm, place / "storm", int(sys.argv[2]), float(sys.argv[3])),
        "limit": attempt(limited, place / "limit"),
    }
    print(json.dumps(found))
