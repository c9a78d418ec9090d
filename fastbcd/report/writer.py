"""write: reads runs, makes the sections, and writes the page and its figures.

The page is one HTML file that contains its figures and loads nothing else. The same run gives the
same bytes. A run that is not finished, or is being written, is read as of its last finished step.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

from fastbcd.report import figures, page, sections
from fastbcd.report.sections import Network, Section
from fastbcd.report.subject import subject
from fastbcd.runs.stages import Stages, read
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

FOOTER = (
    f"fastbcd {__version__}. Published curves: Coordinate Descent for Network Linearization, "
    f"unless another paper is named."
)


def write(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    arch: str | None = None,
    data: str | None = None,
    baseline: float | None = None,
    network: Network | None = None,
) -> Path:
    """Write the report on some runs into the folder `out`; returns the path of the page.

    Args:
        runs: any number of run directories, or a recipe's folders with its stages; the first one
            decides which published curves are drawn. A method has one colour and mark.
        arch, data: names of the net and the data set, if the run did not record them.
        baseline: test accuracy of the dense net in percent, if none of the runs has it.
        network: bandwidth, round trip and protocol of private inference; 1 Gbit/s, 1 ms, CrypTen.

    >>> write(["runs/15k"], "runs/15k/report")  # doctest: +SKIP
    PosixPath('runs/15k/report/report.html')
    """
    if not runs:
        raise ValueError("name at least one run directory")
    if baseline is not None and not 0 < baseline <= 100:
        raise ValueError(f"baseline={baseline}; give a test accuracy in percent, above 0")
    with figures.style():
        found = _distinct([read(run) for run in runs])
        subjects = [subject(run, arch, data) for run in found]
        about, network, several = subjects[0], network or Network(), len(found) > 1
        shared: list[Section | None] = [
            sections.relative(found, about, baseline),
            sections.summary(found, subjects, baseline), sections.between(found),
        ]  # fmt: skip
        parts = [("", sections.accuracy(found, about, network)), ("", list(filter(None, shared)))]
        for number, run in enumerate(found, 1):
            own = sections.of_run(run, network, prefix=f"{number}-" if several else "")
            if several:
                parts.append((run.name, own))
            else:
                parts[-1][1].extend(own)
        folder = _writable(Path(out))
        images = {s.name: _png(s.figure) for _, part in parts for s in part if s.figure}
    notices = [text for run in found if (text := sections.unfinished(run))]
    others = [r.name for r, named in zip(found, subjects, strict=True) if named != about]
    if others:
        notices.append(f"Another net or data set than {found[0].name}: {', '.join(others)}.")
    title = sections.title(found, about)
    html = page.render(title, notices, parts, images=images, footer=FOOTER)
    files = {f"{name}.png": png for name, png in images.items()} | {"report.html": html.encode()}
    for name, content in files.items():
        write_atomically(folder / name, methodcaller("write", content))
    return folder / "report.html"


def _distinct(runs: list[Stages]) -> list[Stages]:
    """Runs of the same name get a number."""
    names = [run.name for run in runs]
    for place, name in enumerate(names):
        if names.count(name) > 1:
            number = names[: place + 1].count(name)
            runs[place] = dataclasses.replace(runs[place], name=f"{name} ({number})")
    return runs


def _writable(folder: Path) -> Path:
    """The folder, created if needed; an error if nothing can be written there."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder for the page and its figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (probe := folder / ".probe").touch()
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
