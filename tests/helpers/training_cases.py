"""Training on two gloo ranks, and runs that are killed; each case runs in a forked process.

`python tests/helpers/training_cases.py FOLDER` runs all cases and prints their results as JSON.
See tests/training/test_processes.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import fastbcd
from fastbcd import Finetuner
from fastbcd.runs.directory import RunDirectory, State
from fastbcd.runtime import ranks
from fastbcd.scoring.accuracy import accuracy
from helpers import sync_norm
from helpers.kill_cases import fork, succeeds
from helpers.nets import make, thinned
from helpers.rank_cases import on_ranks, said
from helpers.start_cases import QUICK, SHORT, data, state
from helpers.train_cases import SMALL, pair

KILLED_AT = 3


def result(net: torch.nn.Module, **more: Any) -> dict[str, Any]:
    tensors = state(net)
    last = next(t for name, t in reversed(tensors.items()) if name.endswith("weight"))
    return {"digest": ranks.digest(tensors).hex(), "weights": last.flatten().tolist(), **more}


# ------------------------------------------------------------------------------- on two ranks


def finetuned(folder: Path, name: str = "mlp", synced: bool = False, **changes: Any) -> Any:
    net, teacher = thinned(make(name)), make(name)
    # 41 samples: shares of 8 and 8, and in the last batch of 4 and 5.
    settings = dataclasses.replace(SMALL, **changes)
    tuner = Finetuner(net, pair(41), settings, teacher, seed=1)
    if synced and ranks.world() > 1:  # a Finetuner on a CPU refuses it
        sync_norm.on_cpus()
        tuner = Finetuner(net, pair(41), settings, teacher, seed=1)
        tuner.model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(tuner.model)
    losses = [tuner.run(step=s)["loss"] for s in range(2)]
    computed = int(ranks.all_sum(torch.tensor(tuner.teacher.computed)))
    return result(net, loss=losses, computed=computed, accuracy=accuracy(net, pair(41)))


def finetuned_resnet(folder: Path) -> Any:
    return finetuned(folder, "resnet")


def finetuned_synced(folder: Path) -> Any:
    """Batch norm over the images of both ranks."""
    return finetuned(folder, "resnet", synced=True)


def mismatch(folder: Path) -> Any:
    return finetuned(folder, mismatch=0.5)


def dense(folder: Path) -> Any:
    net = make("mlp")
    trained = fastbcd.train(net, pair(41), epochs=2, batch_size=16, padding=1, lr=0.05)
    return result(net, loss=[epoch.loss for epoch in trained.history])


def snl(folder: Path) -> Any:
    where = folder / f"snl{ranks.world()}"
    start = fastbcd.snl(make("mlp"), data(61), 30, run_dir=where, **QUICK)
    return result(start.model, counts=[r.count for r in start.history], kept=start.masks.count())


def autorep(folder: Path) -> Any:
    start = fastbcd.autorep(
        make("mlp"), data(61), 30, epochs=3, lr=0.05, penalty=20.0, batch_size=32, finetune=SHORT
    )
    return result(start.model, counts=[r.count for r in start.history], kept=start.masks.count())


def deepreduce(folder: Path) -> Any:
    start = fastbcd.deepreduce(
        make("mlp"), data(61), 12, epochs=8, trial_epochs=1, lr=0.02, batch_size=32, finetune=SHORT
    )
    facts = [v for r in start.history for v in (r.count, r.notes.get("train_accuracy", 0))]
    return result(start.model, counts=facts, kept=start.masks.bits.nonzero().flatten().tolist())


def senet(folder: Path) -> Any:
    tune = dataclasses.replace(SHORT, mismatch=0.1)
    start = fastbcd.senet(
        make("mlp"), data(61), 20, epochs=3, every=2, lr=0.02, batch_size=32, finetune=tune
    )
    changed = [r.notes["changed"] for r in start.history if "changed" in r.notes]
    return result(start.model, counts=changed, kept=start.masks.count())


def relupruner(folder: Path) -> Any:
    start = fastbcd.relupruner(
        make("mlp"), data(61), 30, epochs=3, warmup=0, interval=1, lr=0.01, batch_size=32,
        finetune=SHORT,
    )  # fmt: skip
    return result(start.model, counts=[r.count for r in start.history], kept=start.masks.count())


def different(folder: Path) -> Any:
    """Ranks with another budget, other images, or too small a batch."""
    r = ranks.rank()
    tiny = dataclasses.replace(SMALL, batch_size=1)
    return [
        said(lambda: fastbcd.snl(make("mlp"), data(61), 30 + r, **QUICK)),
        said(lambda: fastbcd.train(make("mlp"), pair(41, seed=r), epochs=1)),
        said(lambda: Finetuner(make("mlp"), pair(41), tiny)),
    ]


# ----------------------------------------------------------------------------- a killed run


def long_run(folder: Path | None) -> dict[str, Any]:
    start = fastbcd.snl(make("resnet"), data(), 250, run_dir=folder, max_epochs=7, **QUICK)
    records = [[record.count, record.loss, record.notes] for record in start.history]
    return result(start.model, records=records, accuracy=start.accuracy)


def killed(folder: Path) -> None:
    """The same run, killed right after the third epoch is saved."""
    whole = RunDirectory.write

    def write(self: RunDirectory, state: State) -> None:
        whole(self, state)
        if len(state.history) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    RunDirectory.write = write  # type: ignore[method-assign]
    long_run(folder)


def all_cases(folder: Path) -> dict[str, Any]:
    starts = (snl, autorep, deepreduce, senet, relupruner)
    cases = (finetuned, finetuned_resnet, finetuned_synced, mismatch, dense, *starts)
    # One rank alone first: the forked processes then find every module imported.
    alone = [case(folder) for case in cases]
    ranked = [on_ranks(case, folder, 2) for case in cases]
    found: dict[str, Any] = {
        case.__name__: [*two, one] for case, two, one in zip(cases, ranked, alone, strict=True)
    }
    found["different"] = on_ranks(different, folder, 2)
    found["killed"] = not succeeds(fork(lambda: killed(folder / "long")))
    found["saved"] = len((folder / "long" / "history.jsonl").read_text().splitlines())
    found["straight"], found["resumed"] = long_run(None), long_run(folder / "long")
    found["again"] = long_run(folder / "long")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(all_cases(Path(sys.argv[1]))))
