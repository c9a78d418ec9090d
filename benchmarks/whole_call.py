"""One whole call of score: 50 hypotheses on 2,000 images, including the build of the form.

    python benchmarks/whole_call.py                    # ResNet18 at 6,000 and 15,000 ReLUs
    python benchmarks/whole_call.py --loop 51          # the authors' loop in full, too

The authors' loop takes the same time for every hypothesis, so by default it runs on 5 of the 51
(the base is one of them) and its time is multiplied. The numbers of correct answers of both
are printed.
"""

from __future__ import annotations

import argparse
import time

import torch
from test_collapsed import CALL, D, paper_masks

import fastbcd
from nets import build
from table import machine
from test_scoring import Loop

BATCH = 100  # images at a time through the authors' loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--relus", type=int, nargs="+", default=[6_000, 15_000])
    parser.add_argument(
        "--loop", type=int, default=5, help="forwards per image (%(default)s)"
    )
    o = parser.parse_args()
    print(machine(), flush=True)
    hypotheses, images = CALL
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8, generator=g)
    data = fastbcd.ImageData.from_arrays(pixels, torch.arange(images) % 100)
    for relus in o.relus:
        net = fastbcd.convert(build("resnet18"), next(data.batches(2))[0])
        masks = paper_masks(net, "resnet18", relus)
        fastbcd.set_masks(net, masks)
        removals = [masks.sample(D, seed=1, step=0, trial=t) for t in range(hypotheses)]
        begin = time.perf_counter()
        scores = fastbcd.score(net, torch.stack(removals), data)
        ours = time.perf_counter() - begin
        loop = Loop(net, removals[: o.loop - 1], last=False, compiled=False)
        correct = torch.zeros(o.loop, dtype=torch.int64)
        begin = time.perf_counter()
        with torch.inference_mode():
            for x, labels in data.batches(BATCH):
                correct += (loop(x).argmax(2) == labels).sum(1)
        theirs = (time.perf_counter() - begin) * (hypotheses + 1) / o.loop
        found = torch.cat([torch.tensor([scores.base_correct]), scores.correct])[
            : o.loop
        ]
        print(
            f"ResNet18, {relus:,} ReLUs: {scores.engine} {ours:.0f} s, the authors' loop "
            f"{theirs:.0f} s ({o.loop} of {hypotheses + 1} forwards timed): {theirs / ours:.1f}x; "
            f"correct answers {found.tolist()} and {correct.tolist()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
