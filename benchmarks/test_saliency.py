"""The saliency of all ReLUs against one forward and backward pass of the net.

    make bench                                             the table
    pytest benchmarks/test_saliency.py                     this alone

A round goes over 64 images. Peers:
    training pass       forward and backward with the gradients of all weights, eager, NCHW
    input pass          forward and backward to the input alone, in fastbcd's own fused form
    hooks               the saliency by forward hooks and autograd: z and dL/da of every unit are
                        kept, and multiplied when the backward pass is done
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastbcd
from fastbcd.graph.fuse import fused
from fastbcd.masking.masks import mask_modules
from nets import build
from test_scoring import peak_memory

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
PEERS = ["training pass", "input pass", "hooks", "fastbcd"]
IMAGES = 64


def training_pass(net, data: fastbcd.ImageData) -> None:
    for x, labels in data.batches(32):
        F.cross_entropy(net(x), labels).backward()


def input_pass(net, data: fastbcd.ImageData) -> None:
    model, memory_format = fused(net, train=False)
    for p in net.parameters():
        p.requires_grad_(False)
    for x, labels in data.batches(32, memory_format=memory_format):
        F.cross_entropy(model.eval()(x.requires_grad_()), labels).backward()


def by_hooks(net, data: fastbcd.ImageData) -> Tensor:
    modules = list(mask_modules(net).values())
    totals = [
        torch.zeros(m.mask.shape, dtype=torch.float64, device=data.device)
        for m in modules
    ]
    for x, labels in data.batches(32):
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [m.register_forward_hook(lambda m, i, o, s=seen: s.append((i[0], o)))
                 for m in modules]  # fmt: skip
        loss = F.cross_entropy(net(x.requires_grad_()), labels, reduction="sum")
        for hook in hooks:
            hook.remove()
        grads = torch.autograd.grad(loss, [y for _, y in seen])
        for total, (z, _), g in zip(totals, seen, grads, strict=True):
            total += (g * z.detach().clamp(max=0)).abs().sum(0)
    return torch.cat([t.flatten() for t in totals]).cpu() / len(data)


def ours(net, data: fastbcd.ImageData) -> Tensor:
    return fastbcd.saliency(net, data, batch_size=32)


RUNS: dict[str, Callable] = dict(
    zip(PEERS, (training_pass, input_pass, by_hooks, ours), strict=True)
)


# The topmost parameter varies fastest, so the peers of a case run one after the other.
@pytest.mark.parametrize("implementation", PEERS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_saliency(benchmark, implementation, name, device) -> None:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=g)
    data = fastbcd.ImageData.from_arrays(images, torch.arange(IMAGES) % 10).to(device)
    net = fastbcd.convert(build(name).to(device), next(data.batches(2))[0])
    benchmark.group = f"saliency {name}, {IMAGES} images, {device}"
    benchmark.extra_info.update(implementation=implementation)
    run = RUNS[implementation]

    def once() -> Tensor | None:
        found = run(net, data)
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    found = once()
    if found is not None:
        torch.testing.assert_close(found, by_hooks(net, data), rtol=1e-2, atol=1e-8)
    benchmark.pedantic(once, rounds=3)
    benchmark.extra_info["memory"] = peak_memory(once, device)
