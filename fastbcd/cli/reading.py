"""The commands that read runs: report, cost and export."""

from __future__ import annotations

import json as json_format
from argparse import Namespace
from pathlib import Path

import torch

import fastbcd
from fastbcd import MaskSet, private
from fastbcd.cli.inputs import call_model
from fastbcd.cli.options import call


def report(options: Namespace) -> None:
    """Write a page with figures of runs, beside the published results.

    One self-contained HTML page, and its figures as PNG, by default in RUN/report. Runs need not be
    finished.
    """
    options.out = getattr(options, "out", options.runs[0] / "report")
    page = call(fastbcd.report.write, options)
    figures = len(list(page.parent.glob("*.png")))
    print(f"{page}: open it in a browser; its {figures} figures are beside it as PNG")


def cost(options: Namespace, source: Path, json: bool = False) -> None:
    """Bytes, rounds and seconds of one image in private inference.

    With the source of each value. Of a net that cannot be built from its run, and of a file of
    masks, the activations alone; in a file removed ReLUs count as the identity.

    Args:
        source: a run directory or a file of masks
        json: print JSON
    """
    if source.is_file():
        cost = call(private.cost, options, MaskSet.load(source))
    else:
        run = fastbcd.load_run(source)
        if run.masks is None:
            raise ValueError(
                f"{run.path} has no final masks yet: finish {run.title} first"
            )
        if "name" in (run.config.net.arch or {}):
            cost = call(private.cost, options, run.model)
        else:
            cost = call(private.cost, options, run.masks, poly=run.poly, line=run.line)
    text = str(cost)
    if json:
        text = json_format.dumps(cost.as_dict(), indent=2, ensure_ascii=False)
    print(text)


def export(source: Path, out: Path = Path("net.pt2"), model: str | None = None) -> None:
    """Write the net of a run, which then evaluates only the ReLUs kept, as .pt2 or .onnx.

    The file takes normalised images.

    Args:
        source: a run directory
        out: NAME.pt2 for torch.export, or NAME.onnx (net.pt2)
        model: MODULE:FUNCTION, if the run was made with --model; the function is called only if it
            is named here
    """
    run = fastbcd.load_run(source)
    size = run.config.data.shape
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    if model is not None:
        run = fastbcd.load_run(source, call_model(model, images, run.replacement))
    difference = private.export(run.model, images, out)
    check = "not compared: onnxruntime is missing"
    if difference is not None:
        check = f"logits differ by {difference:.1g}"
    shape = "×".join(map(str, size))
    print(
        f"{out}: {run.count:,} ReLUs, any batch of {shape} normalised images; {check}"
    )
