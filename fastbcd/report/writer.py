"""write: reads runs, and writes the page and its figures.

The page is one HTML file that contains its figures and loads nothing else. The same run gives the
same bytes. A run that is not finished, or is being written, is read as of its last finished step.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fastbcd.private.protocols import LAN_BANDWIDTH, LAN_RTT, Protocol
from fastbcd.report import figures
from fastbcd.report.classes import class_accuracies
from fastbcd.report.page import Card, render
from fastbcd.report.published import Curve, curves
from fastbcd.report.results import Result, counted, facts, headline, result_of
from fastbcd.runs.read import run_folders
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

FOOTER = (
    f"fastbcd {__version__}. Published curves: Coordinate Descent for Network Linearization, "
    f"unless another paper is named. Private inference: one image; 'activations only' is "
    f"without linear layers and pools, where the net cannot be built from its run."
)
ABOUT = {
    "accuracy": "The large hollow mark is the start, the large filled one the net as it is now. A "
    "line is the way down: ReLUs are removed, and the net is trained after each step. Where it is "
    "dotted, steps only train. Thin lines are published results.",
    "sites": "A site is one call of ReLU; it has one ReLU per neuron. Grey: all of them. Hatched: "
    "those of the start, if fewer. Black: those kept.",
    "seconds": "Seconds of each site, and below the line of each linear layer: rounds take the "
    "round trips between the parties, bytes the transfer, computation the rest. A site without "
    "ReLUs takes none.",
    "classes": "Test accuracy of each class, with its number of test images, the rarest first. In "
    "brackets the change in percentage points since the net before.",
}


def write(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    protocol: str | Protocol = "crypten",
    bandwidth: str = LAN_BANDWIDTH,
    rtt: str = LAN_RTT,
    test: Any = None,
    before: nn.Module | None = None,
) -> Path:
    """Write the report on some runs into the folder `out`; returns the path of the page.

    Args:
        runs: any number of run directories, or folders with the runs of several budgets; the
            first one decides which published curves are drawn. A method has one colour and mark.
        protocol, bandwidth, rtt: as in `fastbcd.private.cost`.
        test: test images, for the accuracy of each class of the last run.
        before: the net before any removal, for what each class lost.

    >>> write(["runs/15k"], "runs/15k/report")  # doctest: +SKIP
    PosixPath('runs/15k/report/report.html')
    """
    if not runs:
        raise ValueError("name at least one run directory")
    with figures.style():
        connection = {"protocol": protocol, "bandwidth": bandwidth, "rtt": rtt}
        folders = [folder for run in runs for folder in run_folders(run)]
        results = [result_of(folder, **connection) for folder in folders]
        if len(results) > 1:
            results = [
                result._replace(name=f"{number}. {result.name}")
                for number, result in enumerate(results, 1)
            ]
        cards = _cards(results, _published(results[0]))
        if test is not None:
            cards.append(_classes(results[-1], test, before))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    html = render(
        ", ".join(result.name for result in results),
        [_unfinished(result) for result in results if not result.run.done],
        headlines={result.name: headline(result) for result in results},
        cards=cards,
        facts={result.name: facts(result) for result in results},
        footer=FOOTER,
    )
    for card in cards:
        write_atomically(folder / f"{card.name}.png", card.png)
    write_atomically(folder / "report.html", html.encode())
    return folder / "report.html"


def _cards(results: Sequence[Result], published: Sequence[Curve]) -> list[Card]:
    """The figures: accuracies of all runs, then sites and seconds of each."""
    measured = results[0].measured
    ends = [
        f"{r.name} {r.points[-1].accuracy:.2f} % at {r.run.count:,}"
        for r in results
        if r.points
    ]
    cards = [
        Card(
            "accuracy",
            f"{measured.capitalize()} against ReLUs",
            f"{measured} against ReLUs: {'; '.join(ends)}",
            ABOUT["accuracy"],
            _png(figures.accuracy(results, published)),
        )
    ]
    for number, result in enumerate(results, 1):
        prefix = ""
        of_run = ""
        if len(results) > 1:
            prefix = f"{number}-"
            of_run = f", {result.name}"
        change = headline(result)
        kept = f"share of the ReLUs that each site keeps: {change['ReLUs']} in total"
        seconds = f"seconds of each part: {change[counted(result.after)]} in total"
        pngs = {
            "sites": (f"ReLUs by site{of_run}", kept, figures.sites(result)),
            "seconds": (
                f"Seconds by layer{of_run}",
                seconds,
                figures.seconds(result.after),
            ),
        }
        for name, (title, alt, figure) in pngs.items():
            cards.append(Card(prefix + name, title, alt, ABOUT[name], _png(figure)))
    return cards


def _classes(result: Result, test: Any, before: nn.Module | None) -> Card:
    """The accuracy of each class of a run's net."""
    rows = class_accuracies(result.run.model, test, before)
    worst = min(rows, key=lambda row: row.now - (row.before or 0.0))
    return Card(
        "classes",
        f"Accuracy by class, {result.name}",
        f"test accuracy of {len(rows)} classes; {worst.name} has {worst.now:.1f} %",
        ABOUT["classes"],
        _png(figures.classes(rows)),
    )


def _published(result: Result) -> list[Curve]:
    """The published curves for the net and data of the run."""
    config = result.run.config
    if result.measured != "test accuracy" or config.net.arch is None:
        return []
    return curves(config.net.arch.get("name"), config.data.name)


def _unfinished(result: Result) -> str:
    """What a run still has to do, in a sentence."""
    done = f"{len(result.run.history):,} steps, {result.run.count:,} ReLUs left"
    return f"{result.name} is not finished: {done}."


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
