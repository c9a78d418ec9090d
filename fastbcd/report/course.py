"""How a run went: its facts, its steps, its time, and what is still to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastbcd.report import figures
from fastbcd.report.contents import (
    Picture,
    Section,
    Table,
    baseline,
    name_of,
)
from fastbcd.report.recognising import Subject, images_of
from fastbcd.runs.read import Chain, Stage


def unfinished(chain: Chain) -> str | None:
    """What is still to come, in a sentence; None if the run is done."""
    last = chain.last
    if last.done:
        return None
    done = len(last.history)
    if last.kind != "bcd":
        state = f"epoch {done}" if done else "its first epoch"
        return f"{chain.name} is not finished: {last.title} is at {state}, {last.count:,} ReLUs."
    go = last.steps_to_go()
    of = "" if go is None else f" of about {done + go}"
    text = f"{chain.name} is not finished: step {done}{of}, {last.count:,} ReLUs left on the way "
    text += f"to {last.settings['budget']:,}."
    if go and done:
        text += f" At the pace so far about {duration(sum(last.seconds().values()) / done * go)} "
        text += "to go."
    return text


def facts(chains: Sequence[Chain], about: Subject, given: float | None) -> Section:
    """What was run and what came of it, one column a run."""
    columns = [_facts(chain, about, baseline(chain, chains, given)) for chain in chains]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    table = Table("", ["", *(chain.name for chain in chains)], rows)
    return Section("In short", "What was run, and what came of it.", None, (table,))


def _facts(chain: Chain, about: Subject, base: float | None) -> dict[str, str]:
    last, bcd, images = chain.last, chain.bcd, images_of(chain.last.config)
    found = {
        "state": "finished" if last.done else "not finished",
        "ReLUs kept": f"{last.count:,} of {last.start.total:,} "
        f"({last.count / last.start.total:.2%})",
        "test accuracy": _percent(last.accuracy),
        "dense accuracy": _percent(base),
        "net": f"{name_of(about.arch)}, {len(last.start.sites)} sites",
        "data": name_of(about.data),
    }
    if images:
        size = f"{images.channels}×{images.height}×{images.width}"
        found["data"] += f"; {images.number:,} train images {size}, {images.classes} classes"
    if chain.start and chain.start.done:
        text = f"{chain.start.title}, {chain.start.count:,} ReLUs"
        found["start"] = f"{text}, {_percent(chain.start.accuracy)}"
    if bcd:
        found |= _descent(bcd)
    spent = {stage.title: sum(stage.seconds().values()) for stage in chain.stages}
    found["time"] = ", ".join(f"{name} {duration(value)}" for name, value in spent.items())
    return found


def _descent(bcd: Stage) -> dict[str, str]:
    s, history = bcd.settings, bcd.history
    samples = "all train images" if s["samples"] is None else f"{s['samples']:,} train images"
    drc = s["drc"] if isinstance(s["drc"], int | str) else _short(s["drc"])
    engines = Counter(step["engine"] for step in history)
    passed = sum(step["accepted"] for step in history)
    found = {
        "began with": f"{bcd.start.count():,} ReLUs",
        "budget": f"{s['budget']:,} ReLUs",
        "search": f"DRC {drc}, RT {s['rt']}, ADT {s['adt']:g}, {_short(s['proposal'])} proposals, "
        f"scored on {samples}, seed {s['seed']}",
        "fine-tuning": _tuning(s),
        "steps": f"{len(history)}, of which {passed} met ADT",
        "hypotheses tried": f"{sum(step['tried'] for step in history):,}",
        "engines": ", ".join(f"{name} {n} steps" for name, n in engines.items()),
    }
    return found if history else {k: v for k, v in found.items() if k != "engines"}


def _tuning(settings: dict[str, Any]) -> str:
    tuning = settings.get("finetune")
    if not isinstance(tuning, dict):
        return str(tuning or "none")
    epochs = "1 epoch" if tuning["epochs"] == 1 else f"{tuning['epochs']} epochs"
    text = f"{epochs} of {tuning['optimizer']}, lr {tuning['lr']:g}, "
    text += settings.get("finetune_when", "").replace("_", " ")
    return text + (", with a teacher" if settings.get("teacher") else "")


def _short(value: Any) -> str:
    """
    >>> _short({"schedule": "Fraction", "share": 0.08, "least": 1})
    'Fraction (share 0.08, least 1)'
    """
    if not isinstance(value, dict):
        return str(value)
    name, *rest = value.values()
    names = list(value)[1:]
    return f"{name} ({', '.join(f'{k} {v}' for k, v in zip(names, rest, strict=True))})"


def steps(bcd: Stage, prefix: str) -> Section:
    """Hypotheses tried and accuracy, step by step."""
    title = "Steps"
    if not bcd.history:
        return Section(title, "No step is finished yet.")
    text = "Above: how many hypotheses each step tried before one dropped by less than ADT "
    text += f"({bcd.settings['adt']:g} points), of RT = {bcd.settings['rt']} at most. Below: the "
    text += "accuracy on the images that score, before and right after the removal"
    text += ", and the test accuracy when the step was over." if bcd.config["test"] else "."
    head = ["step", "ReLUs", "removed", "tried", "taken", "met ADT", "train before, %",
            "after, %", "test, %", "engine", "seconds"]  # fmt: skip
    rows = [
        [str(s["number"]), f"{s['after']:,}", f"{s['drc']:,}", str(s["tried"]),
         f"no. {s['chosen']}", "yes" if s["accepted"] else "no", f"{s['base_accuracy']:.2f}",
         f"{s['chosen_accuracy']:.2f}", _number(s["test_accuracy"]), s["engine"],
         f"{sum(s['seconds'].values()):.1f}"]
        for s in bcd.history
    ]  # fmt: skip
    alt = f"Hypotheses tried and accuracy in each of {len(rows)} steps"
    picture = Picture(f"{prefix}steps", alt, lambda: figures.hypotheses(bcd))
    return Section(title, text, picture, (Table("Every step.", head, rows, True),))


def time(chain: Chain, prefix: str) -> Section:
    """Where the time went: by stage and phase, and step by step."""
    rows = []
    for stage in chain.stages:
        spent = stage.seconds()
        whole = sum(spent.values())
        number = f"{len(stage.history):,}"
        for phase, value in sorted(spent.items(), key=lambda item: -item[1]):
            share = f"{value / whole:.1%}" if whole else "–"
            rows.append([stage.title, number, phase, f"{value:,.1f}", share])
    head = ["stage", "steps", "phase", "seconds", "of the stage"]
    table = Table("By stage and phase; a step of training is an epoch.", head, rows, True)
    text = "Where the time went. "
    text += ", ".join(f"{s.title}: {duration(sum(s.seconds().values()))}" for s in chain.stages)
    bcd, picture = chain.bcd, None
    if bcd and bcd.history:
        alt = "Seconds of BCD by phase, in all and in each step"
        picture = Picture(f"{prefix}time", alt, lambda: figures.times(bcd))
        text += ". The figure is of BCD: fine-tuning, scoring, drawing hypotheses, testing, saving"
    return Section("Time", f"{text}.", picture, (table,) if rows else ())


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


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
