"""write: reads runs, and writes the page and its figures.

The page is one HTML file that contains its figures and loads nothing else. The same run gives the
same bytes. A run that is not finished, or is being written, is read as of its last finished step.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastbcd.private.protocols import LAN_BANDWIDTH, LAN_RTT, Protocol
from fastbcd.report import figures
from fastbcd.report.page import Card, render
from fastbcd.report.published import Curve, curves
from fastbcd.report.results import Result, facts, headline, result_of
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

FOOTER = (
    f"fastbcd {__version__}. Published curves: Coordinate Descent for Network Linearization, "
    f"unless another paper is named. Private inference: the activations of one image."
)


def write(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    arch: str | None = None,
    data: str | None = None,
    protocol: str | Protocol = "crypten",
    bandwidth: str = LAN_BANDWIDTH,
    rtt: str = LAN_RTT,
) -> Path:
    """Write the report on some runs into the folder `out`; returns the path of the page.

    Args:
        runs: any number of run directories; the first one decides which published curves are
            drawn. A method has one colour and mark.
        arch, data: names of the net and the data set, if the run did not record them.
        protocol, bandwidth, rtt: as in `fastbcd.private.cost`.

    >>> write(["runs/15k"], "runs/15k/report")  # doctest: +SKIP
    PosixPath('runs/15k/report/report.html')
    """
    if not runs:
        raise ValueError("name at least one run directory")
    with figures.style():
        connection = {"protocol": protocol, "bandwidth": bandwidth, "rtt": rtt}
        results = _distinct([result_of(run, **connection) for run in runs])
        published = _published(results[0], arch, data)
        cards = _cards(results, published)
    folder = _writable(Path(out))
    html = render(
        ", ".join(result.name for result in results),
        [_unfinished(result) for result in results if not result.run.done],
        headlines={result.name: headline(result) for result in results},
        cards=cards,
        facts={result.name: facts(result) for result in results},
        footer=FOOTER,
    )
    files = {f"{card.name}.png": card.png for card in cards}
    files["report.html"] = html.encode()
    for name, content in files.items():
        write_atomically(folder / name, content)
    return folder / "report.html"


def _cards(results: Sequence[Result], published: Sequence[Curve]) -> list[Card]:
    """The figures: accuracies of all runs, then sites and seconds of each."""
    measured = results[0].measured
    ends = [f"{r.name} {r.points[-1][1]:.2f} % at {r.run.count:,}" for r in results if r.points]
    cards = [
        Card(
            "accuracy",
            f"{measured.capitalize()} against ReLUs",
            f"{measured} against ReLUs: {'; '.join(ends)}",
            _png(figures.accuracy(results, published)),
        )
    ]
    for number, result in enumerate(results, 1):
        prefix = f"{number}-" * (len(results) > 1)
        of_run = f", {result.name}" * (len(results) > 1)
        kept = headline(result)["ReLUs"]
        time = headline(result)["private inference"]
        cards += [
            Card(
                f"{prefix}sites",
                f"ReLUs by site{of_run}",
                f"share of the ReLUs that each site keeps: {kept} in total",
                _png(figures.sites(result)),
            ),
            Card(
                f"{prefix}seconds",
                f"Private inference by site{of_run}",
                f"seconds of private inference of each site: {time} in total",
                _png(figures.seconds(result.after)),
            ),
        ]
    return cards


def _published(result: Result, arch: str | None, data: str | None) -> list[Curve]:
    """The published curves for the net and data of the run, or for those that are named."""
    config = result.run.config
    named = arch is not None or data is not None
    if not named and result.measured != "test accuracy":
        return []
    arch = arch or (config.net.arch or {}).get("name")
    data = data or config.data.name
    chosen = curves(arch or "", data or "")
    if named and not chosen:
        raise ValueError(f"nothing is published of arch={arch!r} on data={data!r}")
    return chosen


def _unfinished(result: Result) -> str:
    """What a run still has to do, in a sentence."""
    done = f"{len(result.run.history):,} steps, {result.run.count:,} ReLUs left"
    return f"{result.name} is not finished: {done}."


def _distinct(results: list[Result]) -> list[Result]:
    """Runs of the same name get a number."""
    names = Counter(result.name for result in results)
    return [
        result._replace(name=f"{result.name} ({number})") if names[result.name] > 1 else result
        for number, result in enumerate(results, 1)
    ]


def _writable(folder: Path) -> Path:
    """The folder, created if needed; an error if nothing can be written there."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder for the page and its figures")
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write into {folder}: {error.strerror}; name another folder"
        ) from error
    return folder


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
