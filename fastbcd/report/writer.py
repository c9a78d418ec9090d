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

from fastbcd.private.protocols import LAN_BANDWIDTH, LAN_RTT, Protocol
from fastbcd.report import figures
from fastbcd.report.page import Card, render
from fastbcd.report.published import Curve, curves
from fastbcd.report.results import ACTIVATIONS, Result, facts, headline, result_of
from fastbcd.runs.read import run_folders
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

FOOTER = (
    f"fastbcd {__version__}. Published curves: Coordinate Descent for Network Linearization, "
    f"unless another paper is named. Private inference: the activations of one image, without "
    f"linear layers."
)


def write(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    protocol: str | Protocol = "crypten",
    bandwidth: str = LAN_BANDWIDTH,
    rtt: str = LAN_RTT,
) -> Path:
    """Write the report on some runs into the folder `out`; returns the path of the page.

    Args:
        runs: any number of run directories, or folders with the runs of several budgets; the
            first one decides which published curves are drawn. A method has one colour and mark.
        protocol, bandwidth, rtt: as in `fastbcd.private.cost`.

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
        f"{r.name} {r.points[-1][1]:.2f} % at {r.run.count:,}"
        for r in results
        if r.points
    ]
    cards = [
        Card(
            "accuracy",
            f"{measured.capitalize()} against ReLUs",
            f"{measured} against ReLUs: {'; '.join(ends)}",
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
        seconds = f"seconds of each site's activations: {change[ACTIVATIONS]} in total"
        sites = _png(figures.sites(result))
        cost = _png(figures.seconds(result.after))
        cards.append(Card(f"{prefix}sites", f"ReLUs by site{of_run}", kept, sites))
        cards.append(
            Card(f"{prefix}seconds", f"Activations by site{of_run}", seconds, cost)
        )
    return cards


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
