"""An estimate, not a measurement: what two changes of the kernels would save on a GPU.

    python benchmarks/batch_norm.py

Counted are the bytes of batch norm, residual and activation for one image of a fine-tuning step in
bfloat16: now (torch's batch norm, then the fused activation), and with statistics as one kernel
and all the rest as another, the least that an op would move. Per value, 2 bytes each:

                      now                                       one op
    forward           read x; read x, write y; read y, write a  read x; read x, write a
    + residual r      read r                                    read r
    backward          read g, a, write dz                       read g, x
                      read dz, x; read dz, x, write dx          read g, x, write dx
    + residual        (dz is dr)                                read a twice, write dr

One op also needs small kernels that torch's batch norm does not have, forward and backward: from
sums to scale and shift, and from sums to the gradients.

"one bit": the backward of the identity reads one bit per value, which the forward wrote, in place
of a. No memory is saved, since the next convolution keeps a.

Convolutions are taken to reach a share of the GPU's peak, memory a share of its bandwidth. "host"
is what Python needs to start all kernels of a step: where that takes longer, the GPU waits, and
fewer bytes save nothing. A step that is replayed as a CUDA graph has no such limit.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fastbcd
from fastbcd.masking.activations import MaskedActivation

GPUS = {
    "A100 (SXM)": (312e12, 2.04e12),
    "H100 (SXM)": (989e12, 3.35e12),
}  # bfloat16, bytes/s
OF_BANDWIDTH = 0.85
NETS = {
    "resnet18": 0.45,
    "resnet20": 0.15,
}  # the share of the peak: few channels reach less
BATCH = 128  # images of a step
LAUNCH = 10e-6  # seconds of the host for a kernel of torch, autograd included
SITE = 300e-6  # and for an activation: two calls of Python, three launches of Triton
SMALL = 2.5e-6  # seconds of the GPU for a kernel of C numbers
SMALL_KERNELS = 2  # of one op, forward and backward
OPTIMIZER = (
    20 + 12
)  # bytes per weight: SGD reads w, g, m and writes w, m; autocast's conversions


class Launches(TorchDispatchMode):
    """Counts the calls that start a kernel."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = (
            not func.is_view
            and "empty" not in func.__name__
            and "detach" not in func.__name__
        )
        self.number += made
        return func(*args, **kwargs or {})


def count(name: str) -> dict[str, float]:
    """Of one image: values of sites without and with residual, of other norms; operations."""
    net = getattr(fastbcd.models, name)(num_classes=10, image_size=32)
    with Launches() as launches:
        net(torch.zeros(2, 3, 32, 32)).sum().backward()
    net.eval()
    sizes = {"norm": 0, "site": 0}
    hooks = {nn.BatchNorm2d: "norm", MaskedActivation: "site"}
    for module in net.modules():
        for kind, key in hooks.items():
            if isinstance(module, kind):
                module.register_forward_hook(
                    lambda m, a, y, key=key: sizes.__setitem__(
                        key, sizes[key] + y[0].numel()
                    )
                )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 32, 32))
    sites = [m.mask.numel() for m in net.modules() if isinstance(m, MaskedActivation)]
    stem = sites[0] * (len(sites) % 2)
    added = (
        sizes["site"] - stem
    ) // 2  # a block has two sites of one size; the second adds
    return {
        "plain": sizes["site"] - added, "added": added, "others": sizes["norm"] - sizes["site"],
        "operations": 3 * counter.get_total_flops(), "launches": launches.number,
        "weights": sum(p.numel() for p in net.parameters()), "sites": len(sites),
    }  # fmt: skip


def main() -> None:
    print(f"estimate in ms for a step of {BATCH} images\n{'':<16}{'convolutions':>14}"
          f"{'norm, activation':>18}{'rest':>7}{'one op':>8}{'share':>7}{'one bit':>9}{'share':>7}"
          f"{'host':>7}")  # fmt: skip
    for name, reached in NETS.items():
        c = count(name)
        values = c["plain"] + c["added"]
        now = 26 * c["plain"] + 28 * c["added"] + 16 * c["others"]
        fused = 16 * c["plain"] + 24 * c["added"] + 16 * c["others"]
        print(f"{name}: {now / 1e6:.1f} MB per image, one op {fused / 1e6:.1f} MB")
        host = LAUNCH * c["launches"] + SITE * c["sites"]
        for gpu, (peak, bandwidth) in GPUS.items():
            rate = OF_BANDWIDTH * bandwidth
            conv = BATCH * c["operations"] / (reached * peak)
            norm = BATCH * now / rate
            rest = OPTIMIZER * c["weights"] / rate
            saved = BATCH * (now - fused) / rate - SMALL * SMALL_KERNELS * c["sites"]
            bit = BATCH * (2 - 2 / 8) * values / rate
            step = conv + norm + rest
            print(f"  {gpu:<14}{1e3 * conv:>14.2f}{1e3 * norm:>18.2f}{1e3 * rest:>7.2f}"
                  f"{1e3 * saved:>8.2f}{saved / step:>7.1%}{1e3 * bit:>9.2f}{bit / step:>7.1%}"
                  f"{1e3 * host:>7.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
