"""One run on several GPUs or machines. On each of two machines, with its own --node-rank:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr first --master-port 29500 \\
        examples/two_machines.py

On one machine without a GPU: torchrun --standalone --nproc-per-node 2 examples/two_machines.py
"""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed

import fastbcd
from fastbcd.cli.demo import trained_resnet


def main(images: int = 4_000, budget: int = 5_000, epochs: int = 6) -> None:
    """All ranks make the same call: images are shared out, rank 0 writes the run."""
    backend = "gloo"
    model = trained_resnet()
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = model.cuda()
    distributed.init_process_group(backend)
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    run = fastbcd.linearize(
        model, train, budget, epochs=epochs, run_dir="runs/two-machines", padding=2
    )
    if distributed.get_rank() == 0:
        print(run)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
