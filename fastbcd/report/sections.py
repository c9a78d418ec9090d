"""The sections of a report: a heading, a short text, a figure and tables, made from runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastbcd import private
from fastbcd.private.costs import si
from fastbcd.report import figures, published
from fastbcd.report.figures import Line
from fastbcd.report.subject import Subject, title_of
from fastbcd.runs.read import SavedRun, Stages


class Table(NamedTuple):
    """Rows of text under column names. A folded table shows its caption until it is opened."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    folded: bool = True


class Picture(NamedTuple):
    """A file name without its suffix, the alternative text, and the figure."""

    name: str
    alt: str
    figure: Any


class Section(NamedTuple):
    title: str
    text: str
    picture: Picture | None = None
    tables: tuple[Table, ...] = ()
    wide: bool = False  # across both columns of the page


@dataclass(frozen=True)
class Network:
    """The connection between the two parties of private inference.

    >>> Network(rtt=0.04)
    Network(bandwidth=1000000000.0, rtt=0.04)
    """

    bandwidth: float = private.costs.LAN_BANDWIDTH  # bits per second
    rtt: float = private.costs.LAN_RTT  # seconds


def title(runs: Sequence[Stages], about: Subject) -> str:
    """The heading of the page."""
    known = str(about) if about.arch or about.data else None
    if len(runs) > 1:
        return f"{len(runs)} runs" + (f": {known}" if known else "")
    last = runs[0].last
    return f"{known or runs[0].name}: {last.count:,} of {last.start.total:,} ReLUs"


def unfinished(run: Stages) -> str | None:
    """What a run still has to do, in a sentence; None if it is finished."""
    last, done = run.last, len(run.last.history)
    if last.done:
        return None
    if last.kind != "bcd":
        state = f"epoch {done}" if done else "its first epoch"
        return f"{run.name} is not finished: {last.title} is at {state}, {last.count:,} ReLUs."
    to_go, pace = last.steps_to_go(), ""
    steps = f"step {done}" if to_go is None else f"step {done} of about {done + to_go}"
    if to_go and done:
        seconds = sum(last.seconds().values()) / done * to_go
        pace = f" About {duration(seconds)} to go at the pace so far."
    return (
        f"{run.name} is not finished: {steps}, {last.count:,} ReLUs left on the way to "
        f"{last.settings['budget']:,}.{pace}"
    )


# ------------------------------------------------------------------------------- accuracy


def accuracy(runs: Sequence[Stages], about: Subject) -> Section:
    """Test accuracy against ReLU count, beside the published curves."""
    lines = [Line(run.name, run.curve()) for run in runs if run.curve()]
    single = _single_points(runs)
    if not lines and not single:
        return _train_accuracy(runs)
    curves = about.curves(published.ACCURACY)
    text = f"Test accuracy against the number of ReLUs kept. {_sources(about, curves)}"
    alt = f"Test accuracy against ReLUs. {_ranges([*lines, *single])}"
    figure = figures.accuracy(lines, single, curves, label="test accuracy, %")
    return Section("Accuracy", text, Picture("accuracy", alt, figure), _points(curves))


def _train_accuracy(runs: Sequence[Stages]) -> Section:
    lines = [Line(run.name, run.train_curve()) for run in runs if run.train_curve()]
    if not lines:
        return Section("Accuracy", "No step is finished yet, so nothing was measured.")
    text = (
        "No test set was given to the run. This is the accuracy on the train images used for "
        "scoring, before each step. Published curves are of test sets and are not drawn."
    )
    alt = f"Train accuracy against ReLUs. {_ranges(lines)}"
    figure = figures.accuracy(lines, [], [], label="train accuracy, %")
    return Section("Accuracy", text, Picture("accuracy", alt, figure))


def relative(runs: Sequence[Stages], about: Subject, given: float | None) -> Section | None:
    """Accuracy as a share of the dense net's, as in the paper's comparison with SENet."""
    if not any(run.curve() for run in runs):
        return None
    heading = "Accuracy relative to the dense net"
    lines = [
        Line(run.name, [(n, 100 * y / dense) for n, y in run.curve()])
        for run in runs
        if run.curve() and (dense := baseline(run, runs, given))
    ]
    if not lines:
        text = "The test accuracy of the dense net is not known: name its run beside this one, or "
        return Section(heading, f"{text}give --baseline PERCENT.")
    curves = about.curves(published.RELATIVE)
    sources = f" {_sources(about, curves)}" if about.arch and about.data else ""
    text = f"Accuracy as a percentage of the dense net's accuracy.{sources}"
    alt = f"{heading}. {_ranges(lines)}"
    figure = figures.accuracy(lines, [], curves, label="accuracy, % of the dense net's")
    return Section(heading, text, Picture("relative", alt, figure), _points(curves))


def baseline(run: Stages, runs: Sequence[Stages], given: float | None) -> float | None:
    """The test accuracy of the dense net: given, of the run's own dense stage, or of another run
    with the same sites and the same test images."""
    if given is not None:
        return given
    mine = run.last.config
    for dense in (other.dense for other in (run, *runs)):
        if dense is None or not dense.done or dense.accuracy is None:
            continue
        same_net = dense.config["net"]["sites"] == mine["net"]["sites"]
        if same_net and dense.config["test"] == mine["test"]:
            return dense.accuracy
    return None


def _single_points(runs: Sequence[Stages]) -> list[Line]:
    """Dense nets and starting points, one point each."""
    found = []
    for run in runs:
        where = "" if len(runs) == 1 else f", {run.name}"
        for stage in (run.dense, run.start):
            if stage is not None and stage.done and stage.accuracy is not None:
                name = "dense" if stage.kind == "dense" else f"start ({stage.title})"
                found.append(Line(name + where, [(stage.count, stage.accuracy)]))
    return found


def _sources(about: Subject, curves: list[published.Curve]) -> str:
    if about.arch is None or about.data is None:
        what, option = ("data set", "--data") if about.arch else ("net", "--arch")
        return (
            f"No published curve is drawn: the run did not record the name of its {what} (use "
            f"{option})."
        )
    if not curves:
        return f"The paper has no such curve for {about}."
    names = ", ".join(sorted({curve.source for curve in curves}))
    return f"The thin curves are the paper's for {about} ({names})."


def _points(curves: list[published.Curve]) -> tuple[Table, ...]:
    rows = [
        [c.method, f"{n:,}", f"{y:.2f}", f"{c.source}; {c.note}" if c.note else c.source]
        for c in curves
        for n, y in c.points
    ]
    head = ["method", "ReLUs", "%", "source"]
    return (Table("The paper's points.", head, rows),) if rows else ()


def _ranges(lines: Sequence[Line]) -> str:
    """
    >>> _ranges([Line("15k", [(30_000, 70.0), (15_000, 68.85)])])
    '15k: from 70.00 % at 30,000 ReLUs to 68.85 % at 15,000 ReLUs'
    """
    texts = []
    for name, points in lines:
        ends = [f"{y:.2f} % at {n:,} ReLUs" for n, y in (points[0], points[-1])]
        texts.append(f"{name}: " + (f"from {ends[0]} to " if len(points) > 1 else "") + ends[1])
    return "; ".join(texts)


# ------------------------------------------------------------------------------- summary


def summary(runs: Sequence[Stages], about: Sequence[Subject], given: float | None) -> Section:
    """Settings and results, one column per run; about: the net and data of each run."""
    columns = [
        _facts(run, named, baseline(run, runs, given))
        for run, named in zip(runs, about, strict=True)
    ]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    table = Table("", ["", *(run.name for run in runs)], rows, folded=False)
    return Section("Summary", "Settings and results.", None, (table,), wide=len(runs) > 1)


def _facts(run: Stages, about: Subject, dense: float | None) -> dict[str, str]:
    last, start, data = run.last, run.start, run.last.config["data"]
    shape = data.get("shape") or [data["channels"], data["height"], data["width"]]
    size = "×".join(map(str, shape))
    facts = {
        "state": "finished" if last.done else "not finished",
        "ReLUs kept": f"{last.count:,} of {last.start.total:,} "
        f"({last.count / last.start.total:.2%})",
        "test accuracy": _percent(last.accuracy),
        "dense accuracy": _percent(dense),
        "net": f"{title_of(about.arch)}, {len(last.start.sites)} sites",
        "data": f"{title_of(about.data)}; {data['images']:,} train images {size}, "
        f"{data['classes']} classes",
    }
    if start and start.done:
        facts["start"] = f"{start.title}, {start.count:,} ReLUs, {_percent(start.accuracy)}"
    facts |= _search_facts(run.bcd) if run.bcd else {}
    times = [f"{stage.title} {duration(sum(stage.seconds().values()))}" for stage in run.stages]
    return {**facts, "time": ", ".join(times)}


def _search_facts(bcd: SavedRun) -> dict[str, str]:
    s, history = bcd.settings, bcd.history
    samples = "all" if s["samples"] is None else f"{s['samples']:,}"
    facts = {
        "ReLUs at the start": f"{bcd.start.count():,}",
        "budget": f"{s['budget']:,} ReLUs",
        "search": f"DRC {_setting(s['drc'])}, RT {s['rt']}, ADT {s['adt']:g}, "
        f"{_setting(s['proposal'])} proposals, scored on {samples} train images, seed {s['seed']}",
        "fine-tuning": _finetuning(s),
        "steps": f"{len(history)}, of which {sum(step['accepted'] for step in history)} met ADT",
        "hypotheses tried": f"{sum(step['tried'] for step in history):,}",
    }
    if history:
        engines = Counter(step["engine"] for step in history)
        facts["engines"] = ", ".join(f"{name} {n} steps" for name, n in engines.items())
    return facts


def _finetuning(settings: dict[str, Any]) -> str:
    tuning = settings.get("finetune")
    if not isinstance(tuning, dict):
        return str(tuning or "none")
    epochs = "1 epoch" if tuning["epochs"] == 1 else f"{tuning['epochs']} epochs"
    when = settings.get("finetune_when", "").replace("_", " ")
    teacher = ", with a teacher" if settings.get("teacher") else ""
    return f"{epochs} of {tuning['optimizer']}, lr {tuning['lr']:g}, {when}{teacher}"


def _setting(value: Any) -> str:
    """
    >>> _setting({"schedule": "Fraction", "share": 0.08, "least": 1})
    'Fraction (share 0.08, least 1)'
    """
    if not isinstance(value, dict) or not value:
        return str(value)
    (_, name), *rest = value.items()
    return f"{name} ({', '.join(f'{k} {v}' for k, v in rest)})"


# ------------------------------------------------------------------------------- one run


def of_run(run: Stages, network: Network, prefix: str = "") -> list[Section]:
    """The sections on one run; the files of its figures begin with the prefix."""
    masks = run.last.masks is not None
    found = [
        sites(run.last) if masks else None,
        cost(run.last, network) if masks else None,
        steps(run.bcd) if run.bcd else None,
        time(run),
        overlaps(run),
    ]
    return [
        s._replace(picture=s.picture and s.picture._replace(name=prefix + s.picture.name))
        for s in found
        if s is not None
    ]


def steps(bcd: SavedRun) -> Section:
    """Hypotheses tried and accuracy in each step."""
    if not bcd.history:
        return Section("Steps", "No step is finished yet.")
    tested = ", and the test accuracy at the end of the step" if bcd.config["test"] else ""
    head = ["step", "ReLUs", "removed", "tried", "taken", "met ADT", "train before, %",
            "after, %", "test, %", "engine", "seconds"]  # fmt: skip
    rows = [
        [str(s["number"]), f"{s['after']:,}", f"{s['drc']:,}", str(s["tried"]),
         f"no. {s['chosen']}", "yes" if s["accepted"] else "no", f"{s['base_accuracy']:.2f}",
         f"{s['chosen_accuracy']:.2f}",
         "–" if s["test_accuracy"] is None else f"{s['test_accuracy']:.2f}", s["engine"],
         f"{sum(s['seconds'].values()):.1f}"]
        for s in bcd.history
    ]  # fmt: skip
    text = (
        f"Above: hypotheses tried in each step until one lost less than ADT "
        f"({bcd.settings['adt']:g} points), at most RT = {bcd.settings['rt']}. Below: accuracy on "
        f"the images used for scoring, before and right after the removal{tested}."
    )
    alt = f"Hypotheses tried and accuracy in each of {len(rows)} steps"
    picture = Picture("steps", alt, figures.steps(bcd))
    return Section("Steps", text, picture, (Table("Every step.", head, rows),))


def time(run: Stages) -> Section:
    """Seconds by stage and phase."""
    rows = []
    for stage in run.stages:
        spent = stage.seconds()
        total = sum(spent.values())
        for phase, value in sorted(spent.items(), key=lambda item: -item[1]):
            share = f"{value / total:.1%}" if total else "–"
            rows.append([stage.title, str(len(stage.history)), phase, f"{value:,.1f}", share])
    head = ["stage", "steps", "phase", "seconds", "of the stage"]
    table = Table("By stage and phase; a step of training is an epoch.", head, rows)
    stages = ", ".join(f"{s.title}: {duration(sum(s.seconds().values()))}" for s in run.stages)
    text, picture = f"Where the time went. {stages}.", None
    if run.bcd and run.bcd.history:
        text += " The figure shows the phases of BCD."
        alt = "Seconds of BCD by phase, in total and in each step"
        picture = Picture("time", alt, figures.times(run.bcd))
    return Section("Time", text, picture, (table,) if rows else ())


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(5_400), duration(200_000)
    ('75 s', '90 min', '56 h')
    """
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} %"


# ------------------------------------------------------------------------------- masks


def sites(stage: SavedRun) -> Section:
    """The ReLUs of each site: in the full net, at the start, now."""
    now = stage.start if stage.masks is None else stage.masks
    before, after = stage.start.counts(), now.counts()
    empty = sum(n == 0 for n in after.values())
    rows = [
        [s.name, f"{s.numel:,}", f"{before[s.name]:,}", f"{after[s.name]:,}",
         f"{after[s.name] / s.numel:.2%}"]
        for s in now.sites
    ]  # fmt: skip
    totals = [f"{n:,}" for n in (now.total, stage.start.count(), now.count())]
    rows.append(["all", *totals, f"{now.count() / now.total:.2%}"])
    text = "The share of its ReLUs that each site had at the start and keeps now. "
    text += f"{empty} of {len(after)} sites keep none." if empty else "No site is empty."
    alt = f"Share of the ReLUs kept at each of {len(after)} sites, {now.count():,} in total"
    table = Table("ReLUs by site.", ["site", "full net", "start", "now", "kept"], rows)
    return Section("ReLUs by site", text, Picture("sites", alt, figures.sites(stage)), (table,))


def overlaps(run: Stages) -> Section | None:
    """IoU of masks along the run; None if there are no two masks to compare."""
    epochs, text = figures.consecutive(run.start), ""
    if run.bcd:
        text += (
            "BCD never restores a ReLU, so the paper's score |both| / |smaller| is 1 for any two "
            "of its masks; |both| / |either| with the start shows what was removed. "
        )
    if run.start and epochs:
        low, pairs = min(iou for _, iou in epochs), run.start.history[-1].get("overlaps")
        text += f"{run.start.title} may restore ReLUs: its masks score at least {low:.3f} from one "
        text += "epoch to the next"
        text += (
            f", {min(p[2] for p in pairs):.3f} over {len(pairs)} random pairs." if pairs else "."
        )
    if not text:
        return None
    figure = figures.overlaps(run.bcd, run.start)
    picture = Picture("overlaps", "Overlap of masks against ReLUs kept", figure)
    return Section("Overlap of masks", text.strip(), picture)


def between(runs: Sequence[Stages]) -> Section | None:
    """IoU of the masks of different runs of one net."""
    found = [(r.name, r.last.masks) for r in runs if r.last.masks is not None and r.last.count]
    found = [(name, m) for name, m in found if m.count() < m.total and m.sites == found[0][1].sites]
    if len(found) < 2:
        return None
    rows = [[name, f"{m.count():,}", *(f"{m.iou(o):.3f}" for _, o in found)] for name, m in found]
    head = ["", "ReLUs", *(name for name, _ in found)]
    table = Table("|both| / |smaller| of the masks.", head, rows, folded=False)
    text = "Whether the runs keep the same ReLUs. 1: the smaller mask is part of the larger. Two "
    text += "random masks score the larger one's share of the net."
    return Section("Masks of different runs", text, None, (table,))


# ------------------------------------------------------------------------------- private inference


def cost(stage: SavedRun, network: Network) -> Section:
    """Bytes, rounds and seconds of the ReLUs of the full net, the start, and now."""
    now = stage.start if stage.masks is None else stage.masks
    full = type(now).full({s.name: s.shape for s in now.sites})
    sets = {"full net": full, "start": stage.start, "now": now}
    if stage.start.count() == full.count():
        del sets["start"]
    link: Any = {"bandwidth": network.bandwidth, "rtt": network.rtt, "poly": stage.poly}
    found = {
        name: [private.cost(masks, protocol, **link) for protocol in private.PROTOCOLS]
        for name, masks in sets.items()
    }
    rows = [
        [c.protocol.name, name, f"{c.relus:,}", si(c.bytes, "B"),
         "unknown" if c.rounds is None else f"{c.rounds:,g}", figures.seconds_text(c)]
        for costs in zip(*found.values(), strict=True)
        for name, c in zip(found, costs, strict=True)
    ]  # fmt: skip
    constants = [
        [p.name, name, "unknown" if c.value is None else f"{c.value:g}", c.source]
        for p in private.PROTOCOLS.values()
        for name, c in p.constants().items()
    ]
    connection = f"{si(network.bandwidth, 'bit/s')}, round trip {si(network.rtt, 's')}"
    empty = ", ".join(s.name for s in found["now"][0].emptied)
    text = f"Cost of the activations of one image in private inference ({connection}), without "
    text += "linear layers. ≥: a value of the protocol is unknown and left out."
    text += f" Emptied sites, whose rounds are saved: {empty}." if empty else ""
    alt = "Seconds of private inference by protocol: "
    alt += "; ".join(f"{r[0]}, {r[1]}: {r[5]}" for r in rows)
    head = ["protocol", "masks", "ReLUs", "bytes", "rounds", "seconds"]
    tables = (
        Table("By protocol.", head, rows),
        Table("Source of each value.", ["protocol", "name", "value", "source"], constants),
    )
    return Section("Private inference", text, Picture("cost", alt, figures.costs(found)), tables)
