"""Several budgets and seeds, one per GPU: each process takes every n-th job of a list.

    torchrun --nproc-per-node 4 examples/jobs.py

The processes share nothing: torch.distributed is not set up, so that every run has
a GPU for itself. The same command resumes what was interrupted, and skips what is done.
"""

import os

import torch

import fastbcd
from fastbcd.cli.demo import trained_resnet

JOBS = [(budget, seed) for budget in (8_000, 4_000, 2_000, 1_000) for seed in (0, 1, 2)]


def main(jobs=JOBS, images=8_000, epochs=16) -> None:
    """Run this process's part of the jobs."""
    number = int(os.environ.get("RANK", 0))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    train = fastbcd.load("fashion-mnist-mini", "train").first(images).to(device)
    test = fastbcd.load("fashion-mnist-mini", "test").to(device)
    model = trained_resnet().to(device)
    for budget, seed in jobs[number::processes]:
        run = fastbcd.linearize(
            model,
            train,
            budget,
            epochs=epochs,
            seed=seed,
            test=test,
            padding=2,
            run_dir=f"runs/jobs/{budget}-{seed}",
            progress=False,
        )
        print(f"{budget:,} ReLUs, seed {seed}: {run}", flush=True)


if __name__ == "__main__":
    main()
