"""Sixteen short runs of everything that decides an outcome, each as digests and its history.

    python tests/helpers/golden_runs.py            # prints what the runs give now, as JSON
    python tests/helpers/golden_runs.py --record   # makes that tests/golden.json

tests/test_golden.py compares. Only public names are used, so that the file outlives changes below
them. Digests of weights depend on the CPU and on torch: `machine` says where they were recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastbcd

GOLDEN = Path(__file__).parents[1] / "golden.json"
TIMES = {"seconds", "digest", "teacher_seconds", "phase"}  # that say nothing of the outcome


class Block(nn.Module):
    """A residual block whose shortcut is the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


def model() -> nn.Module:
    """3×8×8 images, 5 classes, untrained."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(4),
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).eval()  # fmt: skip


def data(count: int = 120, seed: int = 0) -> fastbcd.ImageData:
    """Images whose class is the channel and sign of a pattern, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=generator)
    patterns = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    images = patterns[labels] + torch.randn(count, 3, 8, 8, generator=generator)
    return fastbcd.ImageData.from_arrays(
        images, labels, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), classes=5
    )


def net(replacement: str = "identity") -> nn.Module:
    """The converted model after three epochs of training."""
    converted = fastbcd.convert(model(), torch.zeros(2, 3, 8, 8), replacement=replacement)
    fastbcd.train(converted, data(), epochs=3, batch_size=32, lr=0.05, padding=1)
    return converted.eval()


def trained() -> nn.Module:
    """The model with the weights of `net`."""
    dense = model()
    dense.load_state_dict(net().state_dict(), strict=False)
    return dense


TUNE = fastbcd.Finetune(epochs=1, lr=0.02, batch_size=32, padding=1, teacher_cache=10**7)
SHORT: dict[str, Any] = {"drc": 400, "rt": 3, "adt": 1.0, "finetune": TUNE}
START: dict[str, Any] = {"batch_size": 32, "finetune": TUNE}


def result(run: Any, folder: Path) -> dict[str, Any]:
    """Digests of the masks and weights of a run or a starting point, and all that it records."""
    config = json.loads((folder / "config.json").read_text())
    weights = sorted((k, v) for k, v in run.model.state_dict().items() if not k.endswith("mask"))
    return {
        "masks": sha(fastbcd.masks(run.model).bits),
        "weights": sha(*(tensor for _, tensor in weights)),
        "counts": list(fastbcd.masks(run.model).counts().values()),
        "history": [plain(record) for record in run.history],
        "config": {name: config[name] for name in ("format", "settings", "data", "test", "net")},
    }


def sha(*tensors: Tensor) -> str:
    mark = hashlib.sha256()
    for tensor in tensors:
        mark.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return mark.hexdigest()[:16]


def plain(record: Any) -> dict[str, Any]:
    """A record as JSON, without times and without what it does not say."""
    fields = dict(record if isinstance(record, dict) else vars(record))
    fields |= fields.pop("notes", {})
    known = {name: value for name, value in fields.items() if name not in TIMES}
    return json.loads(json.dumps({name: v for name, v in known.items() if v not in (None, 0)}))


# ----------------------------------------------------------------------------------- the runs


def bcd(folder: Path, **options: Any) -> dict[str, Any]:
    options = {"budget": 300, "test": data(40, seed=1), "run_dir": folder, **SHORT, **options}
    budget = options.pop("budget")
    return result(fastbcd.bcd(net(), data(), budget, **options), folder)


def count(folder: Path) -> dict[str, Any]:
    return bcd(folder, teacher=net())


def target(folder: Path) -> dict[str, Any]:
    cost = fastbcd.private.Target(
        seconds="9ms", protocol="crypten", rtt="0.2ms", activations_only=True
    )
    return bcd(folder, budget=cost, drc=400)


def max_sites(folder: Path) -> dict[str, Any]:
    return bcd(folder, max_sites=3, proposal=fastbcd.Blocks(distilled=True), teacher=net())


def confidence(folder: Path) -> dict[str, Any]:
    return bcd(folder, confidence=0.9, adt=4.0, budget=600, drc=250)


def margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """The probability of the label: a metric that is not a count."""
    return outputs.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


def metric(folder: Path) -> dict[str, Any]:
    return bcd(folder, metric=margin, adt=0.01, proposal="saliency", samples=60)


def on_reject(folder: Path) -> dict[str, Any]:
    drc = fastbcd.Adaptive(200)
    return bcd(folder, finetune_when="on_reject", adt=4.0, drc=drc, engine="stacked", test_every=2)


def own_body(folder: Path) -> dict[str, Any]:
    trained, images = net(), data()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    history = []
    for step in fastbcd.steps(trained, images, 300, drc=500, rt=2, run_dir=folder):
        for x, labels in images.batches(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(trained(x), labels)
            loss.backward()
            optimizer.step()
        step.train_loss = float(loss.detach())
        history.append(step)
    return result(fastbcd.load_run(folder, model=trained), folder)


def linearize(folder: Path, replacement: str = "line", **options: Any) -> dict[str, Any]:
    run = fastbcd.linearize(
        trained(), data(), 300, epochs=3, test=data(40, seed=1), replacement=replacement,
        batch_size=32, padding=1, progress=False, run_dir=folder, **options,
    )  # fmt: skip
    return result(run, folder)


def linearize_identity(folder: Path) -> dict[str, Any]:
    return linearize(folder, "identity", distill=0)


def linearize_poly(folder: Path) -> dict[str, Any]:
    return linearize(folder, "poly")


def killed(folder: Path) -> dict[str, Any]:
    """The run of `count`, killed by the second call of its training, and resumed."""
    child = os.fork()
    if not child:
        calls = []

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return F.cross_entropy(outputs, targets)

        bcd(folder, loss=loss)
    os.waitpid(child, 0)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:  # the same name as before
        return F.cross_entropy(outputs, targets)

    return bcd(folder, loss=loss)


def snl(folder: Path) -> dict[str, Any]:
    start = fastbcd.snl(
        net(), data(), 300, lr=0.03, lambda0=3e-3, kappa=1.5, max_epochs=8, run_dir=folder, **START
    )
    return result(start, folder)


def autorep(folder: Path) -> dict[str, Any]:
    start = fastbcd.autorep(
        net("poly"), data(), 300, epochs=3, lr=0.05, penalty=20.0, run_dir=folder, **START
    )
    return result(start, folder)


def deepreduce(folder: Path) -> dict[str, Any]:
    start = fastbcd.deepreduce(
        net(), data(), 300, epochs=8, trial_epochs=1, lr=0.02, run_dir=folder, **START
    )
    return result(start, folder)


def senet(folder: Path) -> dict[str, Any]:
    start = fastbcd.senet(net(), data(), 300, epochs=3, every=2, lr=0.02, run_dir=folder, **START)
    return result(start, folder)


def relupruner(folder: Path) -> dict[str, Any]:
    start = fastbcd.relupruner(
        net(), data(), 300, epochs=3, warmup=0, interval=1, lr=0.01, run_dir=folder, **START
    )
    return result(start, folder)


def two_ranks(folder: Path) -> dict[str, Any]:
    """The run of `count` on two ranks, as rank 0 has it."""
    folder.mkdir()
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            found = count(folder / "run")
            (folder / f"rank{rank}").write_text(json.dumps(found))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    first, second = (json.loads((folder / f"rank{rank}").read_text()) for rank in range(2))
    assert first == second, "the ranks end with different nets"
    return first


RUNS: list[Callable[[Path], dict[str, Any]]] = [
    count, target, max_sites, confidence, metric, on_reject, own_body, linearize,
    linearize_identity, linearize_poly, killed, snl, autorep, deepreduce, senet, relupruner,
    two_ranks,
]  # fmt: skip


def machine() -> dict[str, str]:
    """What digests of weights depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def all_runs() -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = {run.__name__: run(Path(folder) / run.__name__) for run in RUNS}
    return {"machine": machine(), "runs": runs}


if __name__ == "__main__":
    found = all_runs()
    if "--record" in sys.argv:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(json.dumps(found))
