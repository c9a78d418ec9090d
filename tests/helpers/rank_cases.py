"""Two gloo ranks, started by fork from one process that has torch imported.

`python tests/rank_cases.py FOLDER` goes through all cases and prints what each rank found as
JSON; `torchrun tests/rank_cases.py FOLDER` is one rank of a small run. See tests/test_ranks.py.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import fastbcd
from fastbcd.data import sources
from fastbcd.data.images import ImageData
from fastbcd.descent import problem as descent
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import read_state
from fastbcd.runtime import ranks
from fastbcd.scoring.engine import ENGINES
from helpers.nets import images, make, thinned
from helpers.run_cases import contents, small_net, small_run

NETS = ["mlp", "resnet", "mixture"]
BASE: dict[str, Any] = {"budget": 5, "drc": 10, "rt": 1, "finetune": None}


def problem(name: str, n: int) -> tuple[Any, Any]:
    net, (x, labels) = thinned(make(name)), images(n, n)
    with torch.no_grad():
        answers = net(x).argmax(1)
    return net, (x, torch.where(torch.arange(n) % 4 == 0, labels, answers))


def said(work: Callable[[], object]) -> str:
    """The error's text."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ------------------------------------------------------------- what every rank does, and one alone


def collectives(folder: Path) -> Any:
    r = ranks.rank()

    def fails() -> str:
        raise KeyError("here")

    agreed = [torch.tensor([r, 2.0 * r]), torch.tensor(r), torch.tensor([[3.0 - r]])]
    ranks.agree(agreed)

    return {
        "sum": ranks.all_sum(torch.tensor([r + 1, 10])).tolist(),
        "bits": ranks.from_first(torch.tensor([r == 0, r == 1])).tolist(),
        "scalar": ranks.from_first(torch.tensor(float(r))).item(),
        "half": ranks.from_first(torch.tensor([2.5 + r], dtype=torch.bfloat16)).tolist(),
        "text": [ranks.on_first(lambda t=t: t) for t in (f"größer {r}", "")],
        "agreed": [t.tolist() for t in agreed],
        "on first": ranks.on_first(lambda: f"from {r}"),
        "failure": said(lambda: ranks.on_first(fails)),
        "same": said(lambda: ranks.check_same("the masks", {"m": torch.arange(3)})),
        "other values": said(lambda: ranks.check_same("the masks", {"m": torch.arange(3) + r})),
        "other shape": said(lambda: ranks.check_same("the masks", {"m": torch.zeros(3 + r)})),
    }


def scores(folder: Path) -> Any:
    """Counts and losses, for numbers of images that do not divide, and fewer than ranks."""
    found = []
    for name in NETS:
        for n, batch in ((1, 1), (2, 3), (7, 3), (13, 2), (30, None)):
            net, data = problem(name, n)
            masks = fastbcd.masks(net)
            removals = [masks.sample(9, seed=0, step=n, trial=t) for t in range(4)]
            s = fastbcd.score(net, removals, data, fastbcd.Engine(batch_size=batch))
            losses = [round(loss, 6) for loss in [s.base_loss, *s.loss.tolist()]]
            found.append([name, n, s.correct.tolist(), s.base_correct, s.samples, losses])
            s = fastbcd.score(net, removals, data, fastbcd.Engine(batch_size=batch), metric=margin)
            found.append([round(value, 5) for value in [s.base_value, *s.value.tolist()]])
    return found


def margin(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A metric that is not a count."""
    return outputs.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


def choices(folder: Path) -> Any:
    """Decisions, taken early or late, over ADT and wave."""
    found = []
    for name in NETS:
        for n, adt, wave in ((31, -90.0, 2), (31, 3.0, 3), (17, 0.0, 8), (6, 20.0, 1), (1, 0.5, 2)):
            net, data = problem(name, n)
            masks = fastbcd.masks(net)
            removals = [masks.sample(20, seed=3, step=n, trial=t) for t in range(6)]
            engine = fastbcd.Engine(wave=wave, batch_size=3)
            c = fastbcd.choose(net, removals, data, adt=adt, engine=engine)
            found.append([name, n, c.number, c.accepted, c.value, c.base_value, c.tried])
    net, data = problem("mlp", 301)
    removals = [fastbcd.masks(net).sample(4, seed=3, step=0, trial=t) for t in range(4)]
    margins = None
    for step in range(2):  # the second with the margins of the first
        c = fastbcd.choose(net, removals, data, adt=3.0, confidence=0.8, step=step, margins=margins)
        margins = c.margins
        found.append([c.number, c.accepted, str(c.seen), c.interval])
    c = fastbcd.choose(net, removals, data, adt=3.0, engine=fastbcd.Engine(precision="mixed"))
    found.append([c.number, c.accepted, c.value, c.rescored > 0])
    return found


def untrained(folder: Path) -> Any:
    """Runs without fine-tuning, with every engine that takes the net."""
    found = []
    for engine in ENGINES:
        net, data = problem("mlp", 25)
        how = fastbcd.Engine(engine, wave=3)
        run = fastbcd.bcd(net, data, 4, drc=7, rt=4, adt=2.0, finetune=None, engine=how)
        chosen = [(s.chosen, s.accepted) for s in run.history]
        found.append([engine, run.masks.bits.nonzero().flatten().tolist(), chosen])
    return found


def salient(folder: Path) -> Any:
    """The same with hypotheses from the saliency, whose batches the ranks share out."""
    found = []
    for name in NETS:
        net, data = problem(name, 300)
        run = fastbcd.bcd(
            net, data, 9, drc=fastbcd.Fraction(0.5), rt=4, adt=2.0, finetune=None,
            proposal="saliency",
        )  # fmt: skip
        chosen = [(s.chosen, s.accepted) for s in run.history]
        found.append([name, run.masks.bits.nonzero().flatten().tolist(), chosen])
    net, data = problem("resnet", 300)
    run = fastbcd.bcd(
        net, data, 40, drc=fastbcd.Fraction(0.5), rt=2, max_sites=1, finetune=None, seed=1
    )
    found.append([[s.returned for s in run.history], run.masks.bits.nonzero().flatten().tolist()])
    net, data = problem("resnet", 300)
    found.append(ranks.digest({"s": fastbcd.saliency(net, data, batch_size=32)}).hex())
    return found


def trained(folder: Path) -> Any:
    """A real run; the last step's weights, and that the steps before were compared."""
    compared = []
    real = ranks.check_same
    ranks.check_same = lambda what, t: (compared.append(what), real(what, t))[1]  # type: ignore
    run = small_run(folder / f"trained{ranks.world()}")
    ranks.check_same = real
    state = ranks.digest(snapshots.take(run.model)).hex()
    return {"state": state, "steps": len(run.history), "compared": compared}


def ddp_loop(folder: Path) -> Any:
    """A plain loop with DistributedDataParallel, and one without; only rank 0 shows progress."""
    found = []
    x, labels = problem("mlp", 24)[1]
    for parallel in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), fastbcd.MaskedReLU((4, 6, 6)),
            torch.nn.Flatten(), torch.nn.Linear(144, 5),
        )  # fmt: skip

        def train(net: Any = net, parallel: bool = parallel) -> None:
            for step in fastbcd.steps(
                net, (x, labels), 44, drc=50, rt=2, test=(x, labels), progress=not ranks.rank()
            ):
                trained = DistributedDataParallel(net) if parallel else net
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                part = slice(12 * ranks.rank(), 12 * (ranks.rank() + 1))
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(
                        trained.train()(x[part]), labels[part] % 5
                    )
                    loss.backward()
                    optimizer.step()
                step.train_loss = loss.item()

        found += [said(train), fastbcd.masks(net).count()]
    return found


def progress(folder: Path) -> Any:
    """linearize whose plan and bar only rank 0 shows."""
    data = fastbcd.load("fashion-mnist-mini").first(64)
    run = fastbcd.linearize(
        small_net(), data, 30, epochs=2, batch_size=32, padding=0, test=data.first(20),
        replacement="identity", progress=ranks.rank() == 0,
    )  # fmt: skip
    return [run.masks.count(), ranks.digest(snapshots.take(run.model)).hex()]


class Pairs(torch.utils.data.Dataset):
    """A Dataset that is not a TensorDataset."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], int(self.labels[i])


def large(folder: Path) -> Any:
    """A Dataset for which rank 0 has no memory."""
    sources.default_memory = lambda device: 2**40 if ranks.rank() else 0
    return said(lambda: sources.as_data(Pairs(*problem("mlp", 25)[1])))


def different(folder: Path) -> Any:
    """Ranks that were given different arguments, one at a time."""
    r = ranks.rank()

    def call(**options: Any) -> str:
        net, (x, labels) = problem("mlp", 20)
        with torch.no_grad():
            next(net.parameters()).add_(options.pop("weights", 0))
        x = x.clone()
        x[13, 0, 0, 0] += options.pop("pixels", 0)
        given = ImageData.from_arrays(
            x, (labels + options.pop("labels", 0)) % 5, mean=(options.pop("mean", 0.0),) * 3,
            std=(1.0,) * 3, classes=5,
        )  # fmt: skip
        return said(lambda: fastbcd.bcd(net, given, **{**BASE, **options}))

    def shake(net: Any, step: Any) -> None:
        pass

    images = problem("mlp", 6)[1]
    refused = call(weights=r, run_dir=folder / "weights")
    return {
        "weights": refused,
        "nothing saved": not (folder / "weights" / "start.safetensors").exists(),
        "labels": call(labels=r),
        "pixels": call(pixels=r),
        "normalisation": call(mean=0.5 * r),
        "test": call(test=(images[0] + r, images[1])),
        "no test": call(test=images if r else None),
        "budget": call(budget=5 + r),
        "finetune": call(finetune=shake if r else None),
        "run_dir": call(run_dir=folder / f"run{r}"),
        "engine": call(engine=fastbcd.Engine("stacked", wave=2 + r)),
    }


def late(folder: Path) -> Any:
    """Rank 1 does not make the call; rank 0 waits for a second only."""
    if ranks.rank() == 1:
        while not (folder / "late2.0").exists():
            time.sleep(0.01)
        return None
    ranks.TIMEOUT = timedelta(seconds=1)
    net, data = problem("mlp", 20)
    return said(lambda: fastbcd.bcd(net, data, **BASE))


def full_disk(folder: Path) -> Any:
    """Only rank 0 writes, but all ranks end with its error."""
    if ranks.rank() == 0:
        os.fsync = lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    return said(lambda: small_run(folder / "full"))


def dies(folder: Path) -> Any:
    """Rank 1 ends before it finishes step 3; rank 0 gets an error."""
    calls, real = [], descent.accuracy

    def accuracy(net: Any, data: Any, **options: Any) -> float:
        calls.append(1)
        if len(calls) == 4 and ranks.rank() == 1:
            os._exit(7)
        return real(net, data, **options)

    descent.accuracy = accuracy
    return said(lambda: small_run(folder / "died"))


# ------------------------------------------------------------------------------- the processes


def work(case: Callable[[Path], Any], folder: Path, rank: int, world: int) -> None:
    """One rank in its own process; its answer goes into a file."""
    answer = folder / f"{case.__name__}{world}.{rank}"
    try:
        if world > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = f"file://{folder}/{case.__name__}.store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        answer.write_text(json.dumps(case(folder)))
        os._exit(0)
    except BaseException:
        answer.write_text(json.dumps({"failed": traceback.format_exc()}))
        os._exit(1)


def on_ranks(case: Callable[[Path], Any], folder: Path, world: int) -> list[Any]:
    """The answers of all ranks; None where a rank ended without one."""
    pids = []
    for rank in range(world):
        tqdm.set_lock(threading.RLock())  # see run_cases.fork
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work(case, folder, rank, world)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    answers = [folder / f"{case.__name__}{world}.{rank}" for rank in range(world)]
    return [json.loads(a.read_text()) if a.exists() else None for a in answers]


def all_cases(folder: Path) -> dict[str, Any]:
    found = {c.__name__: on_ranks(c, folder, 2) for c in CASES}
    for case in (scores, choices, untrained, salient, trained):
        found[case.__name__] = on_ranks(case, folder, 2) + on_ranks(case, folder, 1)
    found["large"] = on_ranks(large, folder, 2)
    found["dies"] = on_ranks(dies, folder, 2)
    found["stood"] = len(read_state(folder / "died").history)
    small_run(folder / "died")  # on one rank, from the two ranks' directory
    found["resumed"] = len(contents(folder / "died")[1])
    return found


CASES = (collectives, different, late, full_disk, ddp_loop, progress)


def one_of_torchrun(folder: Path) -> None:
    """With the file `die` in the folder rank 1 kills itself in step 2."""
    with ranks.joined():
        assert ranks.world() == 2
        doomed = (folder / "die").exists() and ranks.rank() == 1
        for step in fastbcd.steps(
            small_net(), fastbcd.load("fashion-mnist-mini").first(30), 8, drc=20, rt=2,
            run_dir=folder / "run",
        ):  # fmt: skip
            if doomed and step.number == 2:
                os.kill(os.getpid(), 9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        one_of_torchrun(Path(sys.argv[1]))
    else:
        small_run(None)  # imports what is imported late, once for all children
        print(json.dumps(all_cases(Path(sys.argv[1]))))
