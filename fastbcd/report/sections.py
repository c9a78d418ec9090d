"""The sections of a report: a heading, a short text, a figure and tables, made from runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from fastbcd import private
from fastbcd.masking.masks import MaskSet
from fastbcd.private.units import si
from fastbcd.report import figures, published
from fastbcd.report.figures import Line
from fastbcd.report.subject import Subject, setting_text, title_of
from fastbcd.runs.stages import Point, SavedRun, Stages

WORDS = json.loads((resources.files("fastbcd.report") / "sections.json").read_text("utf-8"))


class Table(NamedTuple):
    """Rows of texts and numbers. A folded table shows its caption until it is opened."""

    caption: str
    head: list[str]
    rows: list[list[Any]]
    folded: bool = True


class Section(NamedTuple):
    """Part of the page; `name` is the figure's file, without its suffix."""

    name: str
    title: str
    text: str
    alt: str  # alternative text of the figure
    figure: Any
    tables: list[Table]
    wide: bool = False  # across both columns of the page


def _section(
    name: str, *rows: list[list[Any]], figure: Any = None, columns: Sequence[str] = (), **words: Any
) -> Section:
    """A section of sections.json, with a figure and the rows of its tables.

    columns: names of more columns. words: what is filled into the texts.
    """
    about = WORDS["sections"][name]
    tables = [
        Table(caption, [*head, *columns], several, folded=not columns)
        for (caption, head), several in zip(about.get("tables", {}).items(), rows, strict=False)
        if several
    ]
    text, alt = (about.get(key, "").format(**words).strip() for key in ("text", "alt"))
    return Section(name.split()[-1], about["title"], text, alt, figure, tables)


@dataclass(frozen=True)
class Network:
    """The connection between the two parties of private inference, and their protocol.

    >>> Network(rtt=0.04)
    Network(bandwidth=1000000000.0, rtt=0.04, protocol='crypten')
    """

    bandwidth: float = private.costs.LAN_BANDWIDTH  # bits per second
    rtt: float = private.costs.LAN_RTT  # seconds
    protocol: str | private.Protocol = "crypten"  # whose seconds are drawn

    def cost(self, masks: MaskSet, poly: Sequence[str], protocol: Any = None) -> private.Cost:
        """What these masks cost here; protocol: another one."""
        chosen = self.protocol if protocol is None else protocol
        return private.cost(masks, chosen, bandwidth=self.bandwidth, rtt=self.rtt, poly=poly)


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
    to_go = last.steps_to_go()
    of = "" if to_go is None else f" of about {done + to_go}"
    text = f"{run.name} is not finished: step {done}{of}, {last.count:,} ReLUs left on the way to "
    text += f"{_budget(last)}."
    if to_go and done:
        text += f" About {duration(_spent(last) / done * to_go)} to go at the pace so far."
    return text


def _budget(bcd: SavedRun) -> str:
    """The budget in words."""
    budget, most = bcd.settings["budget"], bcd.settings.get("max_sites")
    text = f"{budget:,} ReLUs" if isinstance(budget, int) else ""
    if isinstance(budget, dict):
        quantity, value = next(iter(budget.items()))
        unit = {"seconds": "s", "bytes": "B"}.get(quantity, "")
        text = f"{si(value, unit)}{'' if unit else ' rounds'} under {budget['protocol']} ("
        text += f"{si(budget['bandwidth'], 'bit/s')}, round trip {si(budget['rtt'], 's')})"
        text += f", {budget['relus']:,} ReLUs" if "relus" in budget else ""
    return text if most is None else f"{text}, {most} sites"


# ------------------------------------------------------------------------------- accuracy


class Way(NamedTuple):
    """The nets of one run with their accuracies; a dense net or a start is one net."""

    label: str
    method: str
    run: Stages
    stage: SavedRun
    points: list[Point]

    def by_relus(self, whole: float = 100) -> Line:
        """Accuracy against ReLUs, in percent of the accuracy `whole`."""
        points = [(p.relus, 100 * p.accuracy / whole) for p in self.points]
        return Line(self.label, self.method, points)


def accuracy(runs: Sequence[Stages], about: Subject, network: Network) -> list[Section]:
    """Test accuracy against ReLUs, with the published curves, and against seconds; else train."""
    for name, found in (("accuracy", _tested(runs)), ("train accuracy", _trained(runs))):
        if found:
            lines, label = [way.by_relus() for way in found], _label(name, about)
            return [_curves(name, about, lines), *seconds(found, network, label=label)]
    return [_section("no accuracy")]


def _tested(runs: Sequence[Stages]) -> list[Way]:
    """The ways of BCD, dense nets and starting points whose test accuracy is known."""
    found = []
    for run in runs:
        where = "" if len(runs) == 1 else f", {run.name}"
        for stage in (run.dense, run.start):
            if stage is not None and (point := stage.point()) is not None:
                own = stage is run.last or stage.kind == "dense"
                name = stage.title if own else f"start ({stage.title})"
                found.append(Way(name + where, stage.title, run, stage, [point]))
        if run.bcd and (curve := run.curve()):
            found.append(Way(run.name, run.method, run, run.bcd, curve))
    return found


def _trained(runs: Sequence[Stages]) -> list[Way]:
    found = [(run, run.bcd, run.train_curve()) for run in runs]
    return [Way(r.name, r.method, r, bcd, curve) for r, bcd, curve in found if bcd and curve]


def relative(runs: Sequence[Stages], about: Subject, given: float | None) -> Section | None:
    """Accuracy as a share of the dense net's, as in the paper's comparison with SENet."""
    ways = [way for way in _tested(runs) if way.stage.kind != "dense"]
    dense = [baseline(way.run, runs, given) for way in ways]
    lines = [way.by_relus(whole) for way, whole in zip(ways, dense, strict=True) if whole]
    if not lines:
        return _section("no baseline") if ways else None
    return _curves("relative", about, lines)


def _curves(name: str, about: Subject, lines: list[Line]) -> Section:
    """Runs and single points, beside the published curves."""
    metric = WORDS["sections"][name].get("metric")
    curves = about.curves(metric) if metric else []
    rows = [
        [c.method, n, y, f"{c.source}; {c.note}" if c.note else c.source]
        for c in curves
        for n, y in c.points
    ]
    sources = "" if name == "relative" and None in about[:2] else _sources(about, curves)
    figure = figures.accuracy(lines, curves, label=_label(name, about))
    return _section(name, rows, figure=figure, sources=sources, ranges=_ranges(lines))


def _label(name: str, about: Subject) -> str:
    """What the vertical axis shows."""
    label = WORDS["sections"][name]["label"]
    return label.replace("accuracy, %", about.metric) if about.metric else label


def seconds(ways: Sequence[Way], network: Network, *, label: str) -> list[Section]:
    """Accuracy against the seconds of private inference, and the cost of each result."""
    lines, rows, missing = [], [], 0
    for way in ways:
        known = [p for p in way.points if p.sites is not None]
        missing += len(way.points) - len(known)
        some = np.linspace(0, len(known) - 1, min(len(known), 200)).round().astype(int)
        if len(known := [known[i] for i in some]):
            costs = [network.cost(way.stage.masks_at(p), way.stage.poly) for p in known]
            points = [(c.known_seconds, p.accuracy) for p, c in zip(known, costs, strict=True)]
            lines.append(Line(way.label, way.method, points))
            c, used = costs[-1], sum(site.relus > 0 for site in costs[-1].sites)
            rows.append([way.label, way.method, c.relus, used, si(c.rounds), si(c.bytes, "B"),
                         figures.seconds_text(c), known[-1].accuracy])  # fmt: skip
    if not rows:
        return []
    least = "" if c.seconds is not None else " at least: a value of the protocol is unknown"
    old = f"{missing} nets are left out: older versions did not record their sites."
    found = _section(
        "seconds", rows, protocol=c.protocol.name, bandwidth=si(c.bandwidth, "bit/s"),
        figure=figures.accuracy(lines, label=label, unit="s",
                                axis=f"{c.protocol.name}, seconds{least}"),
        rtt=si(c.rtt, "s"), old=old if missing else "",
        ranges="; ".join(f"{r[0]}: {r[-1]:.2f} % at {r[-2]}" for r in rows),
    )  # fmt: skip
    return [found._replace(tables=[t._replace(folded=len(rows) == 1) for t in found.tables])]


def baseline(run: Stages, runs: Sequence[Stages], given: float | None) -> float | None:
    """The test accuracy of the dense net: given, of the run's own dense stage, or of another run
    with the same sites and the same test images."""
    mine = run.last.config
    for dense in (other.dense for other in (run, *runs) if given is None):
        if dense is None or not dense.done or dense.accuracy is None:
            continue
        same_net = dense.config["net"]["sites"] == mine["net"]["sites"]
        if same_net and dense.config["test"] == mine["test"]:
            return dense.accuracy
    return given


def _sources(about: Subject, curves: list[published.Curve]) -> str:
    if about.arch is None or about.data is None:
        what = "data set (use --data)" if about.arch else "net (use --arch)"
        return f"No published curve is drawn: the run did not record the name of its {what}."
    if not curves:
        return f"No such published curve is known for {about}."
    names = ", ".join(sorted({curve.source for curve in curves}))
    return f"The thin curves are published ones for {about} ({names})."


def _ranges(lines: Sequence[Line]) -> str:
    """
    >>> _ranges([Line("15k", "BCD", [(30_000, 70.0), (15_000, 68.85)])])
    '15k: from 70.00 % at 30,000 ReLUs to 68.85 % at 15,000 ReLUs'
    """
    texts = []
    for name, _, points in lines:
        ends = [f"{y:.2f} % at {n:,} ReLUs" for n, y in (points[0], points[-1])]
        texts.append(f"{name}: " + (f"from {ends[0]} to " if len(points) > 1 else "") + ends[1])
    return "; ".join(texts)


# ------------------------------------------------------------------------------- summary


def summary(runs: Sequence[Stages], about: Sequence[Subject], given: float | None) -> Section:
    """Settings and results, one column per run; about: the net and data of each run."""
    dense = [baseline(run, runs, given) for run in runs]
    facts = list(map(_facts, runs, about, dense))
    names = dict.fromkeys(name for column in facts for name in column)
    rows = [[name, *(column.get(name) for column in facts)] for name in names]
    found = _section("summary", rows, columns=[run.name for run in runs])
    return found._replace(wide=len(runs) > 1)


def _facts(run: Stages, about: Subject, dense: float | None) -> dict[str, str]:
    """The facts of sections.json that apply to the run."""
    last, data, bcd = run.last, run.last.config["data"], run.bcd
    start = run.start if run.start and run.start.done else None
    shape = data.get("shape") or [data["channels"], data["height"], data["width"]]
    values = {
        "last": last, "state": "finished" if last.done else "not finished", "data": data,
        "method": run.method,
        "share": last.count / last.start.total, "accuracy": _percent(last.accuracy),
        "dense": _percent(dense), "net": title_of(about.arch), "sites": len(last.start.sites),
        "name": title_of(about.data), "size": "×".join(map(str, shape)), "start": start,
        "classes": f", {data['classes']} classes" if data["classes"] else "",
        "start_accuracy": _percent(start.accuracy) if start else "", "metric": about.metric,
        "time": ", ".join(f"{s.title} {duration(_spent(s))}" for s in run.stages),
    }  # fmt: skip
    if bcd:
        s, history = bcd.settings, bcd.history
        engines = Counter(step["engine"] for step in history)
        values |= {
            "s": s, "before": bcd.start.count(), "drc": setting_text(s["drc"]),
            "proposal": setting_text(s["proposal"]), "finetuning": _finetuning(s),
            "steps": len(history), "budget": _budget(bcd),
            "samples": "all" if s["samples"] is None else f"{s['samples']:,}",
            "met": sum(step["accepted"] for step in history),
            "tried": sum(step["tried"] for step in history),
            "engines": ", ".join(f"{name} {n} steps" for name, n in engines.items()),
        }  # fmt: skip
    shown = {
        "always": True,
        "metric": about.metric,
        "start": start,
        "BCD": bcd,
        "steps": bcd and bcd.history,
        "end": True,
    }
    texts = {k: v for part, yes in shown.items() if yes for k, v in WORDS["facts"][part].items()}
    return {name: text.format(**values) for name, text in texts.items()}


def _finetuning(settings: dict[str, Any]) -> str:
    tuning = settings.get("finetune")
    if not isinstance(tuning, dict):
        return setting_text(tuning or "none")
    epochs = "1 epoch" if tuning["epochs"] == 1 else f"{tuning['epochs']} epochs"
    when = settings.get("finetune_when", "").replace("_", " ")
    teacher = ", with a teacher" if settings.get("teacher") else ""
    return f"{epochs} of {tuning['optimizer']}, lr {tuning['lr']:g}, {when}{teacher}"


# ------------------------------------------------------------------------------- one run


def of_run(run: Stages, network: Network, prefix: str = "") -> list[Section]:
    """The sections on one run; the files of its figures begin with the prefix."""
    last, found = run.last, []
    if last.masks is not None:
        found += [sites(last.start, last.masks), cost(last, last.masks, network)]
        found += [site_seconds(network.cost(last.masks, last.poly))]
    found += [section for section in (steps(run.bcd), time(run), overlaps(run)) if section]
    return [section._replace(name=prefix + section.name) for section in found]


def steps(bcd: SavedRun | None) -> Section | None:
    """Hypotheses tried and accuracy in each step; None without BCD."""
    if bcd is None or not bcd.history:
        return _section("no steps") if bcd else None
    rows = [
        [s["number"], s["after"], s["drc"], s["tried"], f"no. {s['chosen']}", s["accepted"],
         s["base_accuracy"], s["chosen_accuracy"], s["test_accuracy"], s["engine"],
         f"{sum(s['seconds'].values()):.1f}"]
        for s in bcd.history
    ]  # fmt: skip
    tested = ", and the test accuracy at the end of the step" if bcd.config["test"] else ""
    return _section(
        "steps", rows, figure=figures.steps(bcd), adt=bcd.settings["adt"], rt=bcd.settings["rt"],
        count=len(rows), tested=tested,
    )  # fmt: skip


def time(run: Stages) -> Section:
    """Seconds by stage and phase."""
    rows = [
        [stage.title, len(stage.history), phase, f"{value:,.1f}",
         f"{value / _spent(stage):.1%}" if _spent(stage) else None]
        for stage in run.stages
        for phase, value in sorted(stage.seconds().items(), key=lambda item: -item[1])
    ]  # fmt: skip
    stages = ", ".join(f"{s.title}: {duration(_spent(s))}" for s in run.stages)
    figure = figures.times(run.bcd) if run.bcd and run.bcd.history else None
    phases = " The figure shows the phases of BCD." if figure else ""
    return _section("time", rows, figure=figure, stages=stages, phases=phases)


def _spent(stage: SavedRun) -> float:
    return sum(stage.seconds().values())


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


def sites(start: MaskSet, now: MaskSet) -> Section:
    """The ReLUs of each site: in the full net, at the start, now."""
    sizes = [(s.name, s.numel, start.counts()[s.name], now.counts()[s.name]) for s in now.sites]
    empty = sum(kept == 0 for *_, kept in sizes)
    sizes.append(("all", now.total, start.count(), now.count()))
    rows = [[*row, f"{row[3] / row[1]:.2%}"] for row in sizes]
    keep = f"{empty} of {len(now.sites)} sites keep none." if empty else "No site is empty."
    return _section(
        "sites", rows, figure=figures.sites(start, now), sites=len(now.sites), keep=keep,
        count=now.count(),
    )  # fmt: skip


def overlaps(run: Stages) -> Section | None:
    """IoU of masks along the run; None if there are no two masks to compare."""
    epochs, start = figures.consecutive(run.start), ""
    if run.start and epochs:
        pairs = run.start.history[-1].get("overlaps")
        random = f", {min(p[2] for p in pairs):.3f} over {len(pairs)} random pairs" if pairs else ""
        start = WORDS["overlap of the start"].format(
            title=run.start.title, low=min(iou for _, iou in epochs), random=random
        )
    if not start and not run.bcd:
        return None
    bcd = WORDS["overlap of BCD"] if run.bcd else ""
    return _section("overlaps", figure=figures.overlaps(run.bcd, run.start), bcd=bcd, start=start)


def between(runs: Sequence[Stages]) -> Section | None:
    """IoU of the masks of different runs of one net."""
    found = [(r.name, r.last.masks) for r in runs if r.last.masks is not None and r.last.count]
    found = [(name, m) for name, m in found if m.count() < m.total and m.sites == found[0][1].sites]
    rows = [[name, m.count(), *(f"{m.iou(o):.3f}" for _, o in found)] for name, m in found]
    return _section("between", rows, columns=[name for name, _ in found]) if len(rows) > 1 else None


# ------------------------------------------------------------------------------- private inference


def cost(stage: SavedRun, now: MaskSet, network: Network) -> Section:
    """Bytes, rounds and seconds of the ReLUs of the full net, the start, and now."""
    full = MaskSet.full({s.name: s.shape for s in now.sites})
    sets = {"full net": full, "start": stage.start, "now": now}
    if stage.start.count() == full.count():
        del sets["start"]
    found = {
        name: [network.cost(m, stage.poly, p) for p in private.PROTOCOLS]
        for name, m in sets.items()
    }
    rows = [
        [c.protocol.name, name, c.relus, si(c.bytes, "B"),
         "unknown" if c.rounds is None else f"{c.rounds:,g}", figures.seconds_text(c)]
        for costs in zip(*found.values(), strict=True)
        for name, c in zip(found, costs, strict=True)
    ]  # fmt: skip
    constants = [
        [p.name, name, "unknown" if c.value is None else f"{c.value:g}", c.source]
        for p in private.PROTOCOLS.values()
        for name, c in p.constants().items()
    ]
    empty = ", ".join(s.name for s in found["now"][0].emptied)
    return _section(
        "cost", rows, constants, figure=figures.costs(found),
        bandwidth=si(found["now"][0].bandwidth, "bit/s"), rtt=si(found["now"][0].rtt, "s"),
        emptied=f"Emptied sites, whose rounds are saved: {empty}." if empty else "",
        seconds="; ".join(f"{r[0]}, {r[1]}: {r[5]}" for r in rows),
    )  # fmt: skip


def site_seconds(cost: private.Cost) -> Section:
    """The seconds of each site, split into rounds, bytes and computation."""
    rows = [
        [s.name, s.relus, si(s.rounds), si(s.bytes, "B"), si(s.latency, "s"), si(s.transfer, "s"),
         si(s.compute, "s"), si(s.seconds, "s")]
        for s in (*cost.sites, cost.total)
    ]  # fmt: skip
    return _section(
        "site-seconds", rows, figure=figures.site_seconds(cost), protocol=cost.protocol.name,
        bandwidth=si(cost.bandwidth, "bit/s"), rtt=si(cost.rtt, "s"),
        total=figures.seconds_text(cost), sites=len(cost.sites) - len(cost.emptied),
    )  # fmt: skip
