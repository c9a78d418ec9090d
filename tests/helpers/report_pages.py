"""Shared by the tests of reports: a parsed page, and run directories of the paper's nets."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

import fastbcd
from fastbcd.runs.config import VERSION, Config, DataFacts, NetFacts
from fastbcd.runs.directory import RunDirectory, State
from fastbcd.runs.step import Start, encode

SHAPES = {  # classes, image size, train images
    "cifar10": (10, 32, 50_000), "cifar100": (100, 32, 50_000), "tiny-imagenet": (200, 64, 100_000)
}  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """The text, the tables, the images and every address in a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.images.append(given)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.lasttag in ("td", "th") and self.rows and data.strip():
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


def large_run(place: Path, arch: str, data: str) -> Path:
    """A run directory of three steps of a net of the paper, without weights."""
    classes, size, images = SHAPES[data]
    with torch.device("meta"):
        net = fastbcd.models.build(arch, classes, size)
    kept = fastbcd.MaskSet.full({s.name: s.shape for s in fastbcd.masks(net).sites})
    kept = kept.without(range(20_000, kept.total))
    facts = DataFacts(
        name=data, images=images, shape=[3, size, size], classes=classes, dtype="uint8",
        mean=[0.5] * 3, std=[0.5] * 3, digest="0123",
    )  # fmt: skip
    settings = {"drc": 100, "proposal": "uniform", "budget": 19_000, "rt": 50, "adt": 0.3}
    sites = {site.name: list(site.shape) for site in kept.sites}
    config = Config(
        format=f"fastbcd.bcd {VERSION}", fastbcd="test", settings=settings, data=facts, test=facts,
        net=NetFacts(arch=net.arch, sites=sites, tensors=dict.fromkeys(names(kept), "bool")),
    )  # fmt: skip
    run = RunDirectory(place, config, "never")
    history: list[dict[str, Any]] = []
    for number in range(4):
        before = kept.count()
        kept = kept.without(kept.sample(100, seed=0, step=number, trial=0)) if number else kept
        step = fastbcd.Step(
            number=number, before=before, after=kept.count(), drc=100, tried=7, chosen=6,
            accepted=True, drops={}, base_accuracy=80.0, base_loss=1.0, chosen_accuracy=79.9,
            chosen_loss=1.0, engine="stacked", test_accuracy=70.0 - number,
            seconds={"score": 5.0, "finetune": 40.0}, sites=list(kept.counts().values()),
        )  # fmt: skip
        if number:
            history = [*history, encode(step)]
        tensors = dict(zip(names(kept), kept.split(), strict=True))
        run.write(State(tensors, encode(Start()), history, number == 3))
    run.close()
    return place


def names(masks: fastbcd.MaskSet) -> list[str]:
    return [f"{site.name}.mask" for site in masks.sites]
