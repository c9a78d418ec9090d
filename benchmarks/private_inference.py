"""Check the cost model: two parties classify an image in private, and the traffic is counted.

    python benchmarks/private_inference.py                           a small net, seconds
    python benchmarks/private_inference.py --replacement poly        with quadratics
    FASTBCD_DATA=folder python benchmarks/private_inference.py --net resnet20

The parties are two processes on loopback. One holds the image, the other the weights; CrypTen
shares both, so that neither sees the other's. Batch norms are folded into convolutions, each site
gathers its kept ReLUs. Products use triples of a trusted dealer (CrypTen's default), which send
nothing here: a deployment without a dealer pays for them in advance. Traffic is what CrypTen's
communicator counts; the loopback device's own count is printed beside it, with packet
headers, Gloo's own messages and other programs' traffic. The model is

    bytes  = 16 * (inputs + weights) of each linear layer + 16 * logits + fastbcd.private.cost
    rounds = one per linear layer, one to reveal the logits             + fastbcd.private.cost

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
import os
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor, nn

import fastbcd
from fastbcd import private
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import MaskSet, mask_modules
from fastbcd.models.resnet import PadShortcut

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the ResNet-20 weights
TOLERANCE = 0.05  # of the bytes
COUNTS = {"resnet20": [188_416, 94_208, 18_840, 3_772, 0], "small": [1_024, 512, 102, 20, 0]}
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
    net = fastbcd.models.resnet20(num_classes=10, image_size=32, replacement=options.replacement)
    net.load_state_dict(load_file(folder / "resnet20-cifar10.safetensors"), strict=False)
    data = fastbcd.ImageData.from_npz(folder / "cifar10-12k.npz", "test", MEAN, STD)
    return net.eval(), next(data.first(1).batches(1))[0]


def spread(full: MaskSet, count: int) -> MaskSet:
    """count ReLUs at random over all sites."""
    return full.without(full.sample(full.total - count, seed=0, step=0, trial=0))


def late(full: MaskSet, count: int) -> MaskSet:
    """The last count ReLUs: most sites are empty."""
    return full.without(range(full.total - count))


def cases(net: nn.Module, options: argparse.Namespace) -> list[tuple[str, MaskSet]]:
    full = MaskSet(fastbcd.masks(net).sites, fastbcd.masks(net).bits)
    counts = options.relus or COUNTS[options.net]
    found = [("spread", spread(full, n)) for n in counts]
    fewest = min((n for n in counts if n), default=0)
    return [*found, ("late", late(full, fewest))] if fewest else found


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
        return tuple(self.crypten.cryptensor(t.detach(), src=WEIGHT_OWNER) for t in tensors)

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
        """f[kept] += relu(f[kept]) - f[kept], and quadratics with public coefficients."""
        act: Any = self.net.get_submodule(name)
        flat = x.flatten()
        kept, removed = (m.flatten().nonzero().flatten() for m in (act.mask, ~act.mask))
        y = flat
        if len(kept):
            z = flat[kept]
            y = y.index_add(0, kept, z.relu() - z)
        if isinstance(act, MaskedPoly) and len(removed):
            z = flat[removed]
            c0, c1, c2 = act.coef.detach()[:, removed // act.mask[0].numel()]
            y = y.index_add(0, removed, z.square() * c2 + z * (c1 - 1) + c0)
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


def party(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """One of the two processes; the first tells what it counted."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", RENDEZVOUS=f"tcp://127.0.0.1:{port}",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    crypten = import_crypten()
    crypten.init()
    crypten.cfg.communicator.verbose = True  # count
    network = crypten.communicator.get()
    net, image = build(options)
    secret, shared = Secret(net, crypten), crypten.cryptensor(image, src=IMAGE_OWNER)
    for place, masks in cases(net, options):
        fastbcd.set_masks(net, masks)
        with torch.no_grad():
            expected = net(image)
        network.barrier()
        before = carried()
        network.reset_communication_stats()
        begin = time.perf_counter()
        logits = secret.infer(shared)
        row = dict(network.get_communication_stats(), seconds=time.perf_counter() - begin)
        network.barrier()
        cost = private.cost(net, "crypten")
        row.update(
            place=place, relus=masks.count(), sites=len(cost.sites) - len(cost.emptied),
            squares=cost.total.squares, carried=carried() - before,
            model_bytes=secret.linear_bytes + (cost.bytes or 0),
            model_rounds=secret.linear_rounds + (cost.rounds or 0),
            error=float((logits - expected).abs().max() / expected.abs().max()),
            same_class=bool(logits.argmax() == expected.argmax()),
        )  # fmt: skip
        if rank == 0:
            results.put(row)
    if rank == 0:
        results.put(None)
    # A party that leaves with its connections open may abort.
    network.barrier()
    crypten.uninit()


def carried() -> int:
    """Bytes that the loopback device has sent since it is up; 0 where that cannot be read."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


# ------------------------------------------------------------------------------- the table


def show(row: dict[str, Any]) -> bool:
    """One line; True if the model was right."""
    off = row["bytes"] / row["model_bytes"] - 1
    right = abs(off) <= TOLERANCE and row["rounds"] == row["model_rounds"] and row["error"] < 0.05
    print(
        f"{row['relus']:>9,} {row['place']:<7}{row['sites']:>5}{row['squares']:>9,}"
        f"{row['bytes'] / 1e6:>10.3f}{row['model_bytes'] / 1e6:>10.3f}{off:>+9.2%}"
        f"{row['carried'] / 1e6:>10.3f}{row['rounds']:>8}{row['model_rounds']:>7.0f}"
        f"{row['seconds']:>9.2f}{row['error']:>9.1e}  {'' if row['same_class'] else 'other class '}"
        f"{'' if right else 'WRONG'}",
        flush=True,
    )
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--net", choices=COUNTS, default="small")
    parser.add_argument("--replacement", choices=("identity", "poly"), default="identity")
    parser.add_argument("--relus", type=int, nargs="+", help="how many to keep, a row each")
    options = parser.parse_args()
    net, _ = build(options)
    sites, total = len(mask_modules(net)), fastbcd.masks(net).total
    if bad := [n for n in options.relus or () if not 0 <= n <= total]:
        parser.error(f"--relus {bad[0]}: {options.net} has {total:,} ReLUs")
    print(f"{options.net}, {options.replacement}, {total:,} ReLUs at {sites} "
          f"sites; CrypTen, two parties, one image; MB")  # fmt: skip
    print(f"{'ReLUs':>9} {'where':<7}{'sites':>5}{'squares':>9}{'bytes':>10}{'model':>10}{'off':>9}"
          f"{'loopback':>10}{'rounds':>8}{'model':>7}{'seconds':>9}{'error':>9}")  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    parties = mp.spawn(party, (port, options, results), nprocs=2, join=False)
    right = []
    while True:
        while results.empty():
            if parties.join(timeout=0.2) and results.empty():
                raise RuntimeError("the parties ended before they were done")
        if (row := results.get()) is None:
            break
        right.append(show(row))
    parties.join()
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
