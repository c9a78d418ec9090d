"""Check the cost model: two parties classify an image in private; traffic and time are measured.

    python benchmarks/private_inference.py                           a small net, seconds
    python benchmarks/private_inference.py --replacement poly        with quadratics
    FASTBCD_DATA=folder python benchmarks/private_inference.py --net resnet20
    ... --net resnet20 --rtt 0.2 10 40                               the time, by round trip in ms
    ... --net resnet20 --rtt 40 --nets SNL=runs/snl BCD=runs/bcd     of the nets of runs, or masks
    ... --net resnet20 --rtt 0.2 10 40 --nets SNL=runs/latency-cifar10/SNL-8000-ReLUs-0 \\
        BCD=runs/latency-cifar10/BCD-by-count-8000-ReLUs-0 \\
        "BCD, 2.0 s=runs/latency-cifar10/BCD-for-a-target-crypten-WAN-2-s-0"    of latency.py

The parties are two processes on loopback. One holds the image, the other the weights; CrypTen
shares both, so that neither sees the other's. Batch norms are folded into convolutions, each site
gathers its kept ReLUs. Products use triples of a trusted dealer (CrypTen's default), which send
nothing here: a deployment without a dealer pays for them in advance. Traffic is what CrypTen's
communicator counts; the loopback device's own count is printed beside it, with packet
headers, Gloo's own messages and other programs' traffic. The model is

    bytes  = 16 * (inputs + weights) of each linear layer + 16 * logits + fastbcd.private.cost
    rounds = one per linear layer, one to reveal the logits             + fastbcd.private.cost

With --rtt the parties are joined by a link that delivers every packet half a round trip after it
was sent (delayed_link.py, which needs root): real messages are late, and nothing else is added. In
a round of CrypTen each party sends its share of some numbers and waits for the other's. CrypTen
leaves that to Gloo's all_reduce, which first splits the numbers between the parties and then
collects the sums: two round trips. Here the parties exchange their shares directly, which takes one
(Gloo announces a receiver before data is sent); --gloo measures CrypTen as it is. "exchange" is the
measured time of one such round, of 1,000 numbers. The seconds of a net are predicted as

    the seconds of the net without ReLUs and without delay, measured in the same run
    + (rounds of the linear layers, one to reveal the logits) * round trip
    + fastbcd.private.cost(net, "crypten", rtt=round trip).seconds, at unlimited bandwidth

Nets are those of --nets, each the run directory of a ResNet of fastbcd.models, the folder of an arm
of latency.py, or a file of masks for the weights of --net. Without it, ReLUs are kept at random in
as many sites as SNL, BCD, and BCD for a target had in use at 8,000 ReLUs in a first experiment: 18,
13 and 5 of 19.

Exit status 1 if bytes are more than 5 % off, rounds differ or the logits are wrong.

Set-up. CrypTen 0.4.1 requires versions that conflict with a current PyTorch, and a pyproject
extra cannot use --no-deps, so install by hand (python with fastbcd and its torch installed):

    pip install --no-deps crypten==0.4.1
    pip install omegaconf onnx pyyaml future pandas scipy

It also imports a module of older PyTorch, which `import_crypten` replaces.
ResNet-20 needs `cifar10-12k.npz` and `resnet20-cifar10.safetensors` in the folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import socket
import sys
import time
import types
from pathlib import Path
from statistics import median
from typing import Any

import delayed_link
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor, nn

import fastbcd
from fastbcd import private
from fastbcd.data.npz import load_npz
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.models.resnet import PadShortcut, ResNet

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the ResNet-20 weights
TOLERANCE = 0.05  # of the bytes
COUNTS = {
    "resnet20": [188_416, 94_208, 18_840, 3_772, 0],
    "small": [1_024, 512, 102, 20, 0],
}
TIMED = {"resnet20": 8_000, "small": 200}  # ReLUs of the nets that are timed
IN_USE = {
    "like SNL": 18 / 19,
    "like BCD": 13 / 19,
    "like BCD, target": 5 / 19,
}  # of the sites
IMAGE_OWNER, WEIGHT_OWNER = 0, 1


def import_crypten() -> Any:
    """CrypTen, on a PyTorch that no longer has a module that it imports and does not use."""
    missing: Any = types.ModuleType("torch.onnx._internal.registration")
    missing.registry = None
    sys.modules.setdefault(missing.__name__, missing)
    import crypten

    return crypten


# ------------------------------------------------------------------------------- the net


def build(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The net with all its ReLUs, and one image [1, 3, s, s]."""
    torch.manual_seed(0)
    if options.net == "small":
        net = fastbcd.models.ResNet([4, 8], 1, 5, 8, stem_relu=True, shortcut="pad",
                                    replacement=options.replacement)  # fmt: skip
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.2, 0.2)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
        return net.eval(), torch.randn(1, 3, 8, 8)
    folder = Path(os.environ.get("FASTBCD_DATA", "data"))
    net = fastbcd.models.resnet20(
        num_classes=10, image_size=32, replacement=options.replacement
    )
    net.load_state_dict(
        load_file(folder / "resnet20-cifar10.safetensors"), strict=False
    )
    data = load_npz(folder / "cifar10-12k.npz", "test", MEAN, STD)
    return net.eval(), next(data.first(1).batches(1))[0]


def spread(full: MaskSet, count: int) -> MaskSet:
    """count of these ReLUs, at random."""
    return full.without(full.sample(full.count() - count, seed=0, step=0, trial=0))


def late(full: MaskSet, count: int) -> MaskSet:
    """The last count ReLUs: most sites are empty."""
    return full.without(range(full.total - count))


def within(full: MaskSet, count: int, share: float) -> MaskSet:
    """count ReLUs at random in a share of the sites, which lie at equal distances."""
    number = max(1, round(share * len(full.sites)))
    used = {round((i + 0.5) * len(full.sites) / number - 0.5) for i in range(number)}
    masks = full.copy()
    for i, site in enumerate(masks.sites):
        masks.bits[site.start : site.start + site.numel] = i in used
    return spread(masks, count)


def cases(net: nn.Module, options: argparse.Namespace) -> list[tuple[str, nn.Module]]:
    """The nets by name; of those that are timed, the first keeps no ReLU."""
    full, found = fastbcd.masks(net).copy(), []
    if options.rtt:
        count = (options.relus or [TIMED[options.net]])[0]
        shares = {} if options.nets else IN_USE
        found = [("no ReLU", late(full, 0))]
        found += [(name, within(full, count, share)) for name, share in shares.items()]
    else:
        counts = options.relus or COUNTS[options.net]
        fewest = [min(n for n in counts if n)] if any(counts) else []
        found = [("spread", spread(full, n)) for n in counts]
        found += [("late", late(full, n)) for n in fewest]
    made = []
    for name, masks in found:
        made.append((name, copy.deepcopy(net)))
        fastbcd.set_masks(made[-1][1], masks)
    return made + [(name, from_file(path, net)) for name, path in options.nets]


def from_file(path: Path, net: nn.Module) -> nn.Module:
    """The net of a run or of an arm, or this one with the masks of a file."""
    masks = path / "masks.safetensors" if (path / "result.json").exists() else path
    if not masks.is_dir():
        net = copy.deepcopy(net)
        if (weights := masks.with_name("net.safetensors")).exists():
            net.load_state_dict(load_file(weights))
        fastbcd.set_masks(net, MaskSet.load(masks))
        return net
    found = fastbcd.load_run(path).model
    if not isinstance(found, ResNet):
        raise SystemExit(
            f"{path} holds a {type(found).__name__}; give runs of a models.ResNet"
        )
    return found.eval()


# ------------------------------------------------------------------------------- in private


class Secret:
    """The layers of a fastbcd.models.ResNet on secret-shared tensors."""

    def __init__(self, net: nn.Module, crypten: Any) -> None:
        self.net, self.crypten = net, crypten
        self.weights: dict[str, tuple[Any, Any]] = {}
        self.linear_bytes = self.linear_rounds = 0
        for name, module in net.named_modules():
            if isinstance(module, nn.Conv2d):
                norm = net.get_submodule(name.replace("conv", "bn"))
                self.weights[name] = self._share(*folded(module, norm))
            elif isinstance(module, nn.Linear):
                self.weights[name] = self._share(module.weight, module.bias)

    def _share(self, *tensors: Any) -> tuple[Any, ...]:
        return tuple(
            self.crypten.cryptensor(t.detach(), src=WEIGHT_OWNER) for t in tensors
        )

    def infer(self, image: Any) -> Tensor:
        """A secret image [1, 3, s, s] -> logits [1, classes], revealed to both."""
        self.linear_bytes = self.linear_rounds = 0
        x = self.activate(self.convolve(image, "conv1"), "alpha")
        for stage in self.net.stages:  # type: ignore[union-attr]
            for name, block in self.net.get_submodule(stage).named_children():
                x = self.block(x, f"{stage}.{name}", block)
        x = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
        weight, bias = self.weights["linear"]
        self._count(x, weight)
        logits = x.matmul(weight.t()) + bias
        self.linear_bytes += 16 * logits.nelement()
        self.linear_rounds += 1
        return logits.get_plain_text()

    def block(self, x: Any, name: str, block: nn.Module) -> Any:
        y = self.activate(self.convolve(x, f"{name}.conv1"), f"{name}.alpha1")
        y = self.convolve(y, f"{name}.conv2")
        if isinstance(block.shortcut, PadShortcut):
            stride = block.shortcut.stride
            x = x[:, :, ::stride, ::stride].pad(block.shortcut.padding)
        return self.activate(y + x, f"{name}.alpha2")

    def convolve(self, x: Any, name: str) -> Any:
        weight, bias = self.weights[name]
        conv = self.net.get_submodule(name)
        self._count(x, weight)
        return x.conv2d(weight, stride=conv.stride[0], padding=conv.padding[0]) + bias

    def activate(self, x: Any, name: str) -> Any:
        """f[kept] += relu(f[kept]) - f[kept], and lines or quadratics, whose numbers are public."""
        act: Any = self.net.get_submodule(name)
        flat = x.flatten()
        kept, removed = (m.flatten().nonzero().flatten() for m in (act.mask, ~act.mask))
        y = flat
        if len(kept):
            z = flat[kept]
            y = y.index_add(0, kept, z.relu() - z)
        if (coef := act.coefficients()) is not None and len(removed):
            z = flat[removed]
            c0, c1, *c2 = coef.detach()[:, removed // act.mask[0].numel()]
            line = z * (c1 - 1) + c0
            y = y.index_add(0, removed, line + z.square() * c2[0] if c2 else line)
        return y.reshape(x.shape)

    def _count(self, x: Any, weight: Any) -> None:
        """A product of two secrets opens both once, each party sending and receiving 8 bytes."""
        self.linear_bytes += 16 * (x.nelement() + weight.nelement())
        self.linear_rounds += 1


def folded(conv: nn.Conv2d, norm: Any) -> tuple[Tensor, Tensor]:
    """The convolution with its batch norm inside: weight, and bias [C, 1, 1]."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    bias = norm.bias - norm.running_mean * scale
    return conv.weight * scale.view(-1, 1, 1, 1), bias.view(-1, 1, 1)


def party(
    rank: int, port: int, options: argparse.Namespace, link: Any, results: Any
) -> None:
    """One of the two processes; the first tells what it counted."""
    host, device = "127.0.0.1", "lo"
    if link is not None:
        link.join(rank)
        host, device = delayed_link.ADDRESSES[0], delayed_link.DEVICE
        if not options.gloo:
            dist.all_reduce = Exchange
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", RENDEZVOUS=f"tcp://{host}:{port}",
        MASTER_ADDR=host, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=device,
    )  # fmt: skip
    torch.set_num_threads(1)
    crypten = import_crypten()
    crypten.init()
    crypten.cfg.communicator.verbose = True  # count
    network = crypten.communicator.get()
    net, image = build(options)
    shared = crypten.cryptensor(image, src=IMAGE_OWNER)
    nets = [(name, Secret(made, crypten)) for name, made in cases(net, options)]
    # Of the times without delay the first warms up.
    for rtt in [0.0] + [0.0, *options.rtt] * options.repeats:
        if link is not None:
            network.barrier()  # what was sent has arrived
            link.one_way.value = rtt / 2
        numbers = torch.zeros(1000, dtype=torch.int64)
        exchange = median(timed(network.all_reduce, numbers) for _ in range(9))
        for name, secret in nets:
            if not options.rtt or (name == "no ReLU") == (rtt == 0):
                row = inferred(secret, shared, image, network)
                if rank == 0:
                    results.put(row | {"name": name, "rtt": rtt, "exchange": exchange})
        if not options.rtt:
            break
    if rank == 0:
        results.put(None)
    # A party that leaves with its connections open may abort.
    network.barrier()
    crypten.uninit()


class Exchange:
    """dist.all_reduce between two parties: each sends its numbers to the other and adds."""

    count = 0

    def __init__(
        self, mine: Tensor, op: Any, group: Any, async_op: bool = False
    ) -> None:
        self.mine, self.op = mine, op
        self.sent, self.theirs = (
            mine.clone(memory_format=torch.contiguous_format) for _ in "12"
        )
        Exchange.count += 1
        to: Any = {"group": group, "tag": Exchange.count}
        other = 1 - dist.get_rank()
        self.parts = [
            dist.irecv(self.theirs, other, **to),
            dist.isend(self.sent, other, **to),
        ]
        if not async_op:
            self.wait()

    def wait(self) -> None:
        for part in self.parts:
            part.wait()
        if self.op == dist.ReduceOp.SUM:
            self.mine += self.theirs
        elif self.op == dist.ReduceOp.BXOR:
            self.mine ^= self.theirs
        else:
            raise NotImplementedError(f"{self.op} of two shares")


def timed(function: Any, *arguments: Any) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def inferred(
    secret: Secret, shared: Any, image: Tensor, network: Any
) -> dict[str, Any]:
    """What one inference took, and what the model says."""
    net = secret.net
    with torch.no_grad():
        expected = net(image)
    network.barrier()
    before = carried()
    network.reset_communication_stats()
    begin = time.perf_counter()
    logits = secret.infer(shared)
    row = dict(network.get_communication_stats(), seconds=time.perf_counter() - begin)
    network.barrier()
    cost = private.cost(
        net, "crypten", bandwidth=math.inf, rtt=0.0, activations_only=True
    )
    return row | {
        "relus": cost.relus, "sites": len(cost.sites) - len(cost.emptied),
        "squares": cost.total.squares, "carried": carried() - before,
        "model_bytes": secret.linear_bytes + (cost.bytes or 0),
        "model_rounds": secret.linear_rounds + (cost.rounds or 0),
        "compute": cost.seconds,  # of the activations, by the protocol's figures
        "error": float((logits - expected).abs().max() / expected.abs().max()),
        "same_class": bool(logits.argmax() == expected.argmax()),
    }  # fmt: skip


def carried() -> int:
    """Bytes that the loopback device has sent since it is up; 0 where that cannot be read."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0
    )


# ------------------------------------------------------------------------------- the tables


def is_right(row: dict[str, Any]) -> bool:
    off = row["bytes"] / row["model_bytes"] - 1
    return (
        abs(off) <= TOLERANCE
        and row["rounds"] == row["model_rounds"]
        and row["error"] < 0.05
    )


def remark(row: dict[str, Any]) -> str:
    wrong = "" if is_right(row) else "WRONG"
    return f"  {'' if row['same_class'] else 'other class '}{wrong}"


def show_traffic(row: dict[str, Any]) -> None:
    print(
        f"{row['relus']:>9,} {row['name']:<7}{row['sites']:>5}{row['squares']:>9,}"
        f"{row['bytes'] / 1e6:>10.3f}{row['model_bytes'] / 1e6:>10.3f}"
        f"{row['bytes'] / row['model_bytes'] - 1:>+9.2%}"
        f"{row['carried'] / 1e6:>10.3f}{row['rounds']:>8}{row['model_rounds']:>7.0f}"
        f"{row['seconds']:>9.2f}{row['error']:>9.1e}{remark(row)}",
        flush=True,
    )


def tested(path: Path) -> str:
    """The test accuracy of an arm or a run, if it is known."""
    if (path / "result.json").exists():
        found = json.loads((path / "result.json").read_text())["accuracy"]
    else:
        found = fastbcd.load_run(path).accuracy if path.is_dir() else None
    return "" if found is None else f"{found:.2f}"


def show_times(rows: list[dict[str, Any]], accuracy: dict[str, str]) -> None:
    """One line for each round trip and net: the median of the repeats."""
    linear = median(
        row["seconds"] for row in [row for row in rows if not row["rtt"]][1:]
    )
    print(f"without ReLUs and delay {linear:.3f} s, {rows[0]['rounds']} rounds")
    print(f"{'rtt ms':>7}{'exchange':>10}  {'net':<18}{'test %':>7}{'ReLUs':>8}{'sites':>6}"
          f"{'rounds':>8}{'model':>7}{'predicted s':>13}{'measured s':>12}{'off':>8}")  # fmt: skip
    for rtt, name in dict.fromkeys(
        (row["rtt"], row["name"]) for row in rows if row["rtt"]
    ):
        some = [row for row in rows if (row["rtt"], row["name"]) == (rtt, name)]
        row, seconds = some[0], median(row["seconds"] for row in some)
        exchange = median(row["exchange"] for row in some)
        predicted = linear + row["compute"] + row["model_rounds"] * rtt
        print(f"{rtt * 1e3:>7g}{exchange * 1e3:>10.2f}  {name:<18}"
              f"{accuracy.get(name, ''):>7}{row['relus']:>8,}"
              f"{row['sites']:>6}{row['rounds']:>8}{row['model_rounds']:>7.0f}"
              f"{predicted:>13.2f}{seconds:>12.2f}{seconds / predicted - 1:>+8.0%}"
              f"{remark(row)}")  # fmt: skip


def named_path(text: str) -> tuple[str, Path]:
    name, _, path = text.rpartition("=")
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{path!r} does not exist; give name=path")
    return name or Path(path).name, Path(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--net", choices=COUNTS, default="small")
    parser.add_argument(
        "--replacement", choices=("identity", "poly"), default="identity"
    )
    parser.add_argument(
        "--relus", type=int, nargs="+", help="how many to keep, a row each"
    )
    parser.add_argument(
        "--rtt", type=float, nargs="+", default=[], help="round trips in ms"
    )
    parser.add_argument(
        "--nets", type=named_path, nargs="+", default=[], help="with --rtt"
    )
    parser.add_argument(
        "--gloo", action="store_true", help="with --rtt: Gloo's own all_reduce"
    )
    parser.add_argument("--repeats", type=int, default=3, help="with --rtt")
    options = parser.parse_args()
    options.rtt = [rtt / 1e3 for rtt in options.rtt]
    net, _ = build(options)
    sites, total = len(mask_modules(net)), fastbcd.masks(net).total
    if bad := [n for n in options.relus or () if not 0 <= n <= total]:
        parser.error(f"--relus {bad[0]}: {options.net} has {total:,} ReLUs")
    if (options.nets and not options.rtt) or any(rtt <= 0 for rtt in options.rtt):
        parser.error("--nets needs --rtt, with round trips above 0")
    print(f"{options.net}, {options.replacement}, {total:,} ReLUs at {sites} sites; CrypTen, two "
          f"parties, one image{'' if options.rtt else '; MB'}")  # fmt: skip
    if not options.rtt:
        print(f"{'ReLUs':>9} {'where':<7}{'sites':>5}{'squares':>9}{'bytes':>10}{'model':>10}"
              f"{'off':>9}{'loopback':>10}{'rounds':>8}{'model':>7}{'seconds':>9}"
              f"{'error':>9}")  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context: Any = mp.get_context("spawn")
    results, link = context.SimpleQueue(), None
    if options.rtt:
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # the namespaces have no names
        link = delayed_link.DelayedLink(context)
        link.start()
    parties: Any = mp.spawn(party, (port, options, link, results), nprocs=2, join=False)
    rows: list[dict[str, Any]] = []
    while True:
        while results.empty():
            if parties.join(timeout=0.2) and results.empty():
                raise RuntimeError("the parties ended before they were done")
        if (row := results.get()) is None:
            break
        rows.append(row)
        if not options.rtt:
            show_traffic(row)
    parties.join()
    if options.rtt:
        show_times(rows, {name: tested(path) for name, path in options.nets})
    return 0 if all(map(is_right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
