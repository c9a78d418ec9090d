"""An estimate, not a measurement: µs per image of ResNet18 at 32×32 on GPUs that nobody has run.

    python benchmarks/gpu_estimates.py

"scoring" is what `engine="auto"` compares (fastbcd.scoring.profile): per image and hypothesis, the
larger of multiply-adds at the peak rate and bytes at the full bandwidth. In mixed precision 3 % of
the answers are scored again in float32. "fine-tuning" adds, per image, convolutions of the student
(forward and backward) and of the folded teacher, all in bfloat16, and the bytes of what is between
them, at the shares of the peaks that benchmarks/batch_norm.py assumes.

"host" is the time in which Python starts the kernels, divided by the images of a batch: the GPU
cannot be faster without a CUDA graph.
"""

from __future__ import annotations

import batch_norm
import torch

import fastbcd
from fastbcd.scoring.plan import RESCORED
from fastbcd.scoring.profile import TABLE, Profile
from fastbcd.scoring.program import make_program
from fastbcd.scoring.stacked import GPU_ITEMS

FORWARD = (
    batch_norm.SITE / 2
)  # seconds of the host for an activation without its backward
LAUNCHES = (
    91  # of a scored batch (tests/kernels/test_launches.py counts those of ResNet-20)
)


def scoring(profile: Profile) -> None:
    """Prints the estimates for a hypothesis and an image."""
    net = fastbcd.models.resnet18(num_classes=10, image_size=32).eval()
    program = make_program(net, torch.zeros(1, 3, 32, 32))
    work = program.forward
    moved = 2 * sum(program.bytes_per_image.values())
    float32 = profile.seconds("float32", work, moved)
    tf32 = profile.seconds("tf32", work, moved)
    mixed = profile.seconds("bf16", work, moved / 2) + RESCORED * float32
    sites = 2 * len(program.activations)
    host = (profile.launch * (LAUNCHES - sites) + FORWARD * sites) / GPU_ITEMS
    print(f"  scoring      float32 {1e6 * float32:.1f}, TF32 {1e6 * tf32:.1f}, "
          f"mixed {1e6 * mixed:.1f}, host {1e6 * host:.1f}")  # fmt: skip


def finetuning(profile: Profile) -> None:
    """Prints the estimates for an image of a step of 128."""
    counted = batch_norm.count("resnet18")
    student = counted["operations"] / 2
    moved = 26 * counted["plain"] + 28 * counted["added"] + 16 * counted["others"]
    of_teacher = 4 * counted["plain"] + 6 * counted["added"]  # read x, r, write a
    rate = batch_norm.NETS["resnet18"] * profile.bf16
    bandwidth = batch_norm.OF_BANDWIDTH * profile.bandwidth
    weights = batch_norm.OPTIMIZER * counted["weights"] / batch_norm.BATCH
    seconds = 4 / 3 * student / rate + (moved + of_teacher + weights) / bandwidth
    host = batch_norm.LAUNCH * counted["launches"] * 4 / 3
    host += (batch_norm.SITE + FORWARD) * counted["sites"]
    print(f"  fine-tuning  {1e6 * seconds:.1f} with the teacher, "
          f"host {1e6 * host / batch_norm.BATCH:.1f}")  # fmt: skip


def main() -> None:
    for name in ("A100", "H100"):
        profile = Profile(name, **TABLE[name])
        print(f"{name}: µs per image")
        scoring(profile)
        finetuning(profile)


if __name__ == "__main__":
    main()
