"""What a report says: chains of runs in, sections with a sentence, a figure and tables out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastbcd import private
from fastbcd.private.costs import si as in_units
from fastbcd.report import figures, published
from fastbcd.report.figures import Line
from fastbcd.report.recognising import NAMES, Subject
from fastbcd.runs.read import Chain, Stage


class Table(NamedTuple):
    """A caption, the names of the columns, rows of text; folded away until it is asked for."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    folded: bool = False


class Picture(NamedTuple):
    """A file's name without its ending, what it shows to who cannot see it, and how to draw it."""

    name: str
    alt: str
    draw: Callable[[], Any]


class Section(NamedTuple):
    """One point of the report."""

    title: str
    text: str  # what it shows, in a sentence or two
    picture: Picture | None = None
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Network:
    """Between the two parties of private inference.

    >>> Network(rtt=0.04)
    Network(bandwidth=1000000000.0, rtt=0.04)
    """

    bandwidth: float = private.costs.LAN_BANDWIDTH  # bits a second
    rtt: float = private.costs.LAN_RTT  # seconds


# ------------------------------------------------------------------------------- accuracy


def baseline(chain: Chain, others: Sequence[Chain], given: float | None) -> float | None:
    """The dense net's test accuracy: as given, of the chain's own dense stage, or of another's.

    Another chain's counts if it is of the same sites and was measured on the same test images.
    """
    if given is not None:
        return given
    for other in (chain, *others):
        dense, mine = other.dense, chain.last.config
        if dense is None or not dense.done or dense.accuracy is None:
            continue
        same = dense.config["test"] == mine["test"]
        if same and dense.config["net"]["sites"] == mine["net"]["sites"]:
            return dense.accuracy
    return None


def accuracy(chains: Sequence[Chain], about: Subject) -> Section:
    """Test accuracy against ReLU count, beside what was published."""
    runs = [Line(chain.name, chain.curve()) for chain in chains if chain.curve()]
    single = singles(chains)
    if not runs and not single:
        return _train_accuracy(chains)
    curves = _published(about, published.ACCURACY)
    text = f"Test accuracy against the number of ReLUs kept. {_sources(about, curves)}"
    picture = Picture(
        "accuracy",
        f"Test accuracy against ReLUs. {_ranges([*runs, *single])}",
        lambda: figures.accuracy(runs, single, curves, "test accuracy, %"),
    )
    return Section("Accuracy", text, picture, _points(curves))


def singles(chains: Sequence[Chain]) -> list[Line]:
    """Dense nets and starting points, which are one point each."""
    found = []
    for chain in chains:
        for stage in (chain.dense, chain.start):
            if stage is not None and stage.done and stage.accuracy is not None:
                where = "" if len(chains) == 1 else f", {chain.name}"
                title = "dense" if stage.kind == "dense" else f"start ({stage.title})"
                found.append(Line(title + where, [(stage.count, stage.accuracy)]))
    return found


def relative(chains: Sequence[Chain], about: Subject, given: float | None) -> Section | None:
    """The same as a share of the dense net's accuracy, as the paper compares with SENet."""
    if not any(chain.curve() for chain in chains):
        return None
    bases = [baseline(chain, chains, given) for chain in chains]
    runs = [
        Line(chain.name, [(n, 100 * y / base) for n, y in chain.curve()])
        for chain, base in zip(chains, bases, strict=True)
        if base and chain.curve()
    ]
    title, curves = "Accuracy relative to the dense net", _published(about, published.RELATIVE)
    if not runs:
        why = "The dense net's test accuracy is not known here, so there is no relative curve: "
        return Section(title, f"{why}name its run beside this one, or give --baseline PERCENT.")
    text = "Accuracy as a percentage of the dense net's, which allows for better and worse ones."
    text += f" {_sources(about, curves)}" if about.arch and about.data else ""
    picture = Picture(
        "relative",
        f"Accuracy relative to the dense net. {_ranges(runs)}",
        lambda: figures.accuracy(runs, [], curves, "accuracy, % of the dense net's"),
    )
    return Section(title, text, picture, _points(curves))


def _train_accuracy(chains: Sequence[Chain]) -> Section:
    runs = [Line(chain.name, chain.train_curve()) for chain in chains if chain.train_curve()]
    if not runs:
        return Section("Accuracy", "Nothing was measured yet: no step is finished.")
    text = "No test set was given to the run, so this is the accuracy on the train images that "
    text += "score hypotheses, before each step. Published curves are of test sets: none is drawn."
    picture = Picture(
        "accuracy",
        f"Train accuracy against ReLUs. {_ranges(runs)}",
        lambda: figures.accuracy(runs, [], [], "train accuracy, %"),
    )
    return Section("Accuracy", text, picture)


def _published(about: Subject, metric: str) -> list[published.Curve]:
    if about.arch is None or about.data is None:
        return []
    return published.curves(about.arch, about.data, metric)


def _sources(about: Subject, curves: list[published.Curve]) -> str:
    if about.arch is None or about.data is None:
        what, option = ("data set", "--data") if about.arch else ("net", "--arch")
        return (
            f"Nothing published stands beside it: the {what} is not one of the paper's, or not "
            f"recognised as one (say it with {option})."
        )
    if not curves:
        return f"The paper has no such curve for {about}: the run stands alone."
    names = sorted({curve.source for curve in curves})
    return f"The thin curves are the paper's for {about} ({', '.join(names)})."


def _points(curves: list[published.Curve]) -> tuple[Table, ...]:
    rows = [
        [c.method, f"{n:,}", f"{y:.2f}", f"{c.source}; {c.note}" if c.note else c.source]
        for c in curves
        for n, y in c.points
    ]
    head = ["method", "ReLUs", "%", "source"]
    return (Table("The paper's points.", head, rows, True),) if rows else ()


def _ranges(lines: Sequence[Line]) -> str:
    """
    >>> _ranges([Line("15k", [(30_000, 70.0), (15_000, 68.85)])])
    '15k: from 70.00 % at 30,000 ReLUs to 68.85 % at 15,000 ReLUs'
    """
    said = []
    for label, points in lines:
        (first, a), (last, b) = points[0], points[-1]
        begin = f"from {a:.2f} % at {first:,} ReLUs to " if len(points) > 1 else ""
        said.append(f"{label}: {begin}{b:.2f} % at {last:,} ReLUs")
    return "; ".join(said)


# ------------------------------------------------------------------------------- masks


def distribution(stage: Stage, prefix: str) -> Section:
    """The ReLUs of every site: in the full net, at the start, now."""
    now = stage.start if stage.masks is None else stage.masks
    before, after = stage.start.counts(), now.counts()
    empty = [name for name, n in after.items() if n == 0]
    text = "Where the ReLUs are: all that the net has, those it began with, those it keeps now. "
    text += f"{len(empty)} of {len(after)} sites keep none." if empty else "No site is empty."
    rows = [
        [s.name, f"{s.numel:,}", f"{before[s.name]:,}", f"{after[s.name]:,}",
         f"{after[s.name] / s.numel:.2%}"]
        for s in now.sites
    ]  # fmt: skip
    total = [f"{n:,}" for n in (now.total, stage.start.count(), now.count())]
    rows.append(["all", *total, f"{now.count() / now.total:.2%}"])
    table = Table("ReLUs by site.", ["site", "full net", "start", "now", "kept"], rows, True)
    alt = f"ReLUs kept at each of {len(after)} sites, {now.count():,} in all"
    return Section(
        "ReLUs by site",
        text,
        Picture(f"{prefix}sites", alt, lambda: figures.distribution(stage)),
        (table,),
    )


def overlaps(chain: Chain, prefix: str) -> Section | None:
    """IoU of masks along the run; None where there are no two masks."""
    epochs, bcd = figures.consecutive(chain.start), chain.bcd
    text = "How much two masks have in common. "
    if bcd:
        text += "BCD never gives a ReLU back, so the paper's score |both| / |smaller| is 1 for any "
        text += "two of its masks (the saved ones were compared); what is lost shows in |both| / "
        text += "|either| with the start. "
    if chain.start and epochs:
        low = min(iou for _, iou in epochs)
        text += f"{chain.start.title} can: an epoch's mask and the next score at least {low:.3f}"
        if pairs := chain.start.history[-1].get("overlaps"):
            low = min(pair[2] for pair in pairs)
            text += f", and {low:.3f} is the least over random pairs of epochs ({len(pairs)})"
        text += "."
    if not bcd and not epochs:
        return None
    alt = "Overlap of masks against ReLUs kept"
    return Section(
        "Masks in common",
        text.strip(),
        Picture(f"{prefix}overlaps", alt, lambda: figures.overlaps(bcd, chain.start)),
    )


def between(chains: Sequence[Chain]) -> Section | None:
    """IoU of the masks of several runs of one net."""
    found = [(c.name, c.last.masks) for c in chains if c.last.masks is not None and c.last.count]
    found = [(name, m) for name, m in found if m.count() < m.total and m.sites == found[0][1].sites]
    if len(found) < 2:
        return None
    rows = [[name, f"{m.count():,}", *(f"{m.iou(o):.3f}" for _, o in found)] for name, m in found]
    head = ["", "ReLUs", *(name for name, _ in found)]
    table = Table("|both| / |smaller| of the masks as they stand.", head, rows)
    text = "Do runs keep the same ReLUs? 1: the smaller mask lies within the larger; two random "
    text += "masks would score the larger one's share of the net."
    return Section("Masks of different runs", text, None, (table,))


# ------------------------------------------------------------------------------- private inference


def cost(stage: Stage, network: Network, prefix: str) -> Section:
    """Bytes, rounds and seconds of the full net's ReLUs, the start's, and those kept now."""
    now = stage.start if stage.masks is None else stage.masks
    full = type(now).full({s.name: s.shape for s in now.sites})
    sets = {"full net": full, "start": stage.start, "now": now}
    if stage.start.count() == full.count():
        del sets["start"]
    found = {
        name: [private.cost(m, p, network.bandwidth, network.rtt, poly=stage.poly)
               for p in private.PROTOCOLS]
        for name, m in sets.items()
    }  # fmt: skip
    rows = [
        [c.protocol.name, name, f"{c.relus:,}", in_units(c.bytes, "B"),
         "unknown" if c.rounds is None else f"{c.rounds:,g}",
         ("" if c.seconds is not None else "≥ ") + in_units(c.known_seconds, "s")]
        for costs in zip(*found.values(), strict=True)
        for name, c in zip(found, costs, strict=True)
    ]  # fmt: skip
    where = f"{in_units(network.bandwidth, 'bit/s')}, round trip {in_units(network.rtt, 's')}"
    text = f"What the activations of one image take in private inference ({where}); linear layers "
    text += "are not in it. ≥: some figure of the protocol is not known and left out. "
    saved = [s.name for s in found["now"][0].emptied]
    text += f"Emptied sites, whose rounds are saved: {', '.join(saved)}." if saved else ""
    head = ["protocol", "masks", "ReLUs", "bytes", "rounds", "seconds"]
    sources = [
        [p.name, name, "unknown" if c.value is None else f"{c.value:g}", c.source]
        for p in private.PROTOCOLS.values()
        for name, c in p.constants().items()
    ]
    tables = (
        Table("By protocol.", head, rows, True),
        Table("Where each figure comes from.", ["protocol", "figure", "value", "source"], sources,
              True),
    )  # fmt: skip
    alt = "Seconds of private inference by protocol: " + "; ".join(
        f"{r[0]}, {r[1]}: {r[5]}" for r in rows
    )
    return Section(
        "Private inference",
        text.strip(),
        Picture(f"{prefix}cost", alt, lambda: figures.costs(found, in_units)),
        tables,
    )


def title(chains: Sequence[Chain], about: Subject) -> str:
    """The page's heading."""
    if len(chains) > 1:
        return f"{len(chains)} runs: {about}" if about.arch or about.data else f"{len(chains)} runs"
    last = chains[0].last
    what = f"{last.count:,} of {last.start.total:,} ReLUs"
    return f"{about}: {what}" if about.arch or about.data else f"{chains[0].name}: {what}"


def name_of(value: str | None) -> str:
    """A net's or data set's name as people write it."""
    return NAMES.get(value or "", value or "not recognised")
