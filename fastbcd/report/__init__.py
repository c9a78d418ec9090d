"""What a run looks like beside the published results: a page and its figures.

    fastbcd.report.write(["runs/15k"], "runs/15k/report")      # report.html, accuracy.png, …

One HTML file with the figures in it, which are also written beside it; it needs no network and no
script, and it is the same again for the same run. A run that is not finished, or at work, is fine.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastbcd.report import (
    contents,
    course,
    figures,
    page,
    published,
    recognising,
)
from fastbcd.report.contents import Network, Section
from fastbcd.runs.read import Chain, read
from fastbcd.runtime.atomic_files import write_atomically
from fastbcd.runtime.version import __version__

__all__ = ["Network", "published", "write"]

PAGE = "report.html"
PAPER = "Published curves: Coordinate Descent for Network Linearization, the figures and tables \
named with them."


def write(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    arch: str | None = None,
    data: str | None = None,
    baseline: float | None = None,
    network: Network | None = None,
) -> Path:
    """Write the report on some runs into the folder `out`; the page's path.

    Args:
        runs: run directories of bcd, train, snl or autorep, or a recipe's folder of stages; all of
            one net and data set, if the published curves are to mean something beside them.
        arch, data: what the net and data set are called, if they are not recognised.
        baseline: the dense net's test accuracy in percent, if none of the runs says it.
        network: bandwidth and round trip for the cost of private inference; 1 Gbit/s, 1 ms.

    >>> write(["runs/15k"], "runs/15k/report")  # doctest: +SKIP
    PosixPath('runs/15k/report/report.html')
    """
    if not runs:
        raise ValueError("name at least one run directory")
    if baseline is not None and not 0 < baseline <= 100:
        raise ValueError(f"baseline={baseline}; it is a test accuracy in percent, above 0")
    style = figures.style()
    chains = _named([read(run) for run in runs])
    about = recognising.subject(chains[0], arch, data)
    parts = _parts(chains, about, baseline, network or Network())
    folder = _writable(Path(out))
    with style:
        images = {
            s.picture.name: _png(s.picture.draw()) for _, many in parts for s in many if s.picture
        }
    notices = [text for chain in chains if (text := course.unfinished(chain))]
    others = [c.name for c in chains[1:] if recognising.subject(c, arch, data) != about]
    if others:
        notices.append(f"Not about the same net and data as {chains[0].name}: {', '.join(others)}.")
    footer = f"fastbcd {__version__}. {PAPER}"
    text = page.render(contents.title(chains, about), notices, parts, images, footer)
    for name, content in images.items():
        _save(folder / f"{name}.png", content)
    _save(folder / PAGE, text.encode())
    return folder / PAGE


def _parts(
    chains: Sequence[Chain], about: recognising.Subject, baseline: float | None, network: Network
) -> list[tuple[str, list[Section]]]:
    """The sections: what all runs share first, then run by run."""
    shared = [
        contents.accuracy(chains, about),
        contents.relative(chains, about, baseline),
        course.facts(chains, about, baseline),
        contents.between(chains),
    ]
    first = [section for section in shared if section]
    if len(chains) == 1:
        return [("", [*first, *_own(chains[0], "", network)])]
    own = [(c.name, _own(c, f"{number}-", network)) for number, c in enumerate(chains, 1)]
    return [("", first), *own]


def _own(chain: Chain, prefix: str, network: Network) -> list[Section]:
    last, found = chain.last, []
    if last.masks is not None:
        found += [contents.distribution(last, prefix), contents.cost(last, network, prefix)]
    if chain.bcd is not None:
        found.append(course.steps(chain.bcd, prefix))
    found += [course.time(chain, prefix)]
    overlaps = contents.overlaps(chain, prefix)
    return [*found, overlaps] if overlaps else found


def _named(chains: list[Chain]) -> list[Chain]:
    """Chains of one name are told apart by a number."""
    names = [chain.name for chain in chains]
    for place, chain in enumerate(chains):
        if names.count(chain.name) > 1:
            number = names[: place + 1].count(chain.name)
            chains[place] = Chain(f"{chain.name} ({number})", chain.stages, chain.recipe)
    return chains


def _writable(folder: Path) -> Path:
    """The folder, made; an error before any drawing if nothing can be written there."""
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


def _save(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
