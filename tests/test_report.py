"""Reports: what is read from a run, what the page says of it, and that it needs nothing else."""

from __future__ import annotations

import base64
import builtins
import dataclasses
import json
import re
import shutil
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import fastbcd
from fastbcd import cli, report
from fastbcd.report import course, published, recognising
from fastbcd.report.reading import read
from fastbcd.runs import RunDirectory
from run_cases import small_net, small_run

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


@pytest.fixture
def drawn() -> None:
    """For a test that wants real figures."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch) -> None:
    """Figures are made but, where nobody looks at them, not drawn: that takes seconds."""

    def stand_in(figure: Any) -> bytes:
        return PNG + repr([(a.get_xlabel(), a.get_ylabel()) for a in figure.axes]).encode()

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(report, "_png", stand_in)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "whole"
    small_run(place)
    return place


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory) -> Path:
    """The same run, interrupted in its third step of five."""
    place = tmp_path_factory.mktemp("runs") / "cut"

    def train(net: torch.nn.Module, step: fastbcd.Step) -> None:
        if step.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(place, finetune=train)
    return place


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> Path:
    """Dense training, SNL and BCD in one folder, as a recipe leaves them."""
    place = tmp_path_factory.mktemp("runs") / "stages"
    data, net = fastbcd.load("fashion-mnist-mini").first(48), small_net()
    test = data.first(20)
    fastbcd.train(net, data, epochs=2, test=test, run_dir=place / "1-dense", batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the budget is not reached in 3 epochs
        fastbcd.snl(
            net, data, 60, test=test, max_epochs=3, lambda0=0.1, lr=0.05, batch_size=16,
            finetune=fastbcd.Finetune(epochs=1), run_dir=place / "2-snl",
        )  # fmt: skip
    fastbcd.bcd(
        net, data, 20, drc=20, rt=2, finetune=None, test=test, run_dir=place / "3-bcd"
    )  # fmt: skip
    return place


def large_run(place: Path, arch: str, classes: int, images: int, size: int = 32) -> Path:
    """A run directory as of a net of the paper, without its weights: three steps."""
    with torch.device("meta"):
        net = fastbcd.models.build(arch, classes, size)
    kept = fastbcd.MaskSet.full({s.name: s.shape for s in fastbcd.masks(net).sites})
    kept = kept.without(range(20_000, kept.total))
    mark = f"× 3×{size}×{size} uint8, {classes} classes, cpu) 0123"
    config = {
        "format": "fastbcd.run 1",
        "settings": {"drc": 100, "proposal": "uniform", "budget": 19_000, "rt": 50, "adt": 0.3,
                     "samples": None, "seed": 0, "finetune": None, "finetune_when": "every_step"},
        "data": f"ImageData({images} {mark}", "test": f"ImageData(10000 {mark}",
        "net": {"sites": {s.name: s.shape for s in kept.sites}, "tensors": {}},
    }  # fmt: skip
    run = RunDirectory(place, config, "never")
    for number in range(4):
        before = kept.count()
        kept = kept.without(kept.sample(100, seed=0, step=number, trial=0)) if number else kept
        record = {
            "number": number, "before": before, "after": kept.count(), "drc": 100, "tried": 7,
            "chosen": 6, "accepted": True, "drops": {}, "base_accuracy": 80.0, "base_loss": 1.0,
            "chosen_accuracy": 79.9, "chosen_loss": 1.0, "engine": "stacked", "train_loss": None,
            "test_accuracy": 70.0 - number, "seconds": {"score": 5.0, "finetune": 40.0},
        }  # fmt: skip
        tensors = {f"{s.name}.mask": b for s, b in zip(kept.sites, kept.split(), strict=True)}
        run.save(number, tensors, record if number else {})
    run.close()
    return place


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory) -> Path:
    return large_run(tmp_path_factory.mktemp("runs") / "r18", "resnet18", 100, 50_000)


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """The page on some runs, made once."""
    made: dict[Any, tuple[Page, Path]] = {}

    def make(*runs: Path, **options: Any) -> tuple[Page, Path]:
        key = (runs, tuple(options.items()))
        if key not in made:
            path = report.write(runs, tmp_path_factory.mktemp("out"), **options)
            made[key] = Page(path), path.parent
        return made[key]

    return make


def records(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "history.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------- reading


def test_a_finished_run(finished) -> None:
    chain = read(finished)
    stage = chain.bcd
    assert stage is not None
    assert (chain.name, stage.done, stage.count, stage.steps_to_go()) == ("whole", True, 8, 0)
    assert stage.start.count() == 98
    assert stage.history == records(finished)
    assert chain.curve() == [(r["after"], r["test_accuracy"]) for r in records(finished)]
    assert course.unfinished(chain) is None


def test_an_unfinished_run(cut_short) -> None:
    chain = read(cut_short)
    stage = chain.bcd
    assert stage is not None
    assert (stage.done, stage.count, len(stage.history), stage.steps_to_go()) == (False, 58, 2, 3)
    said = course.unfinished(chain) or ""
    assert "cut is not finished: step 2 of about 5, 58 ReLUs left on the way to 8." in said


def test_reading_changes_nothing_and_follows_the_state(finished, tmp_path) -> None:
    """A run that is at work: its history may be ahead of the state, behind it, or cut short."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    lines = (finished / "history.jsonl").read_bytes().splitlines(keepends=True)
    for history in (b"".join(lines[:-1]), b"".join(lines[:-1]) + lines[-1][:20]):
        (place / "history.jsonl").write_bytes(history)
        before = {p.name: p.read_bytes() for p in place.iterdir()}
        stage = read(place).bcd
        assert stage is not None
        found = [{**r, "seconds": None} for r in stage.history]
        assert found == [{**r, "seconds": None} for r in records(finished)]
        assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    (place / "history.jsonl").write_bytes(b"".join(lines))
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    stage = read(place).bcd
    assert stage is not None
    assert len(stage.history) == 4


def test_a_run_that_has_only_begun(tmp_path) -> None:
    def interrupted(net: torch.nn.Module, step: fastbcd.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "new", finetune=interrupted)
    chain = read(tmp_path / "new")
    assert (chain.last.count, chain.last.history, chain.curve()) == (98, [], [])
    page = Page(report.write([tmp_path / "new"], tmp_path / "out"))
    assert "new is not finished: step 0 of about 5, 98 ReLUs left" in page.text
    assert "No step is finished yet." in page.text


@pytest.mark.parametrize(("budget", "steps"), [(501, 1), (500, 1), (499, 2), (250, 2), (0, 10)])
def test_steps_to_go_by_the_last_share(finished, budget, steps) -> None:
    """Of 2,000 ReLUs the last step left 1,000; 1000/2^10 is the first below 1."""
    settings = {"budget": budget, "drc": {"schedule": "Fraction", "share": 0.5}}
    history = [{"before": 2000, "drc": 1000, "count": 1000}]
    stage = dataclasses.replace(
        read(finished).last, masks=None, history=history, config={"settings": settings}
    )
    assert stage.steps_to_go() == steps


def test_stages_of_a_chain(stages) -> None:
    chain = read(stages)
    assert [stage.kind for stage in chain.stages] == ["dense", "snl", "bcd"]
    assert all(stage.done for stage in chain.stages)
    assert chain.dense is not None
    final = records(stages / "2-snl")[-1]["accuracy"]["final"]
    assert chain.curve()[0] == (60, final)
    assert chain.dense.accuracy == records(stages / "1-dense")[-1]["test_accuracy"]


def test_masks_of_another_run_are_refused(finished, tmp_path) -> None:
    """The state of step 4 keeps 18 ReLUs; as its start stands that of step 5, with 8."""
    place = tmp_path / "run"
    shutil.copytree(finished, place)
    (place / "state.safetensors").replace(place / "start.safetensors")
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    with pytest.raises(ValueError, match="keeps 10 ReLUs that its start does not"):
        read(place)


# ------------------------------------------------------------------------------- what it is about


@pytest.mark.parametrize(
    ("arch", "classes", "images", "size", "data"),
    [
        ("resnet18", 10, 50_000, 32, "cifar10"),
        ("resnet18", 200, 100_000, 64, "tiny-imagenet"),
        ("wide_resnet22_8", 100, 50_000, 32, "cifar100"),
        ("resnet18", 100, 49_999, 32, None),
    ],
)
def test_net_and_data_are_recognised(arch, classes, images, size, data, tmp_path) -> None:
    place = large_run(tmp_path / "run", arch, classes, images, size)
    assert recognising.subject(read(place)) == (arch, data)


def test_an_own_net_is_not_taken_for_a_known_one(finished) -> None:
    assert recognising.subject(read(finished)) == (None, None)
    named = recognising.subject(read(finished), "resnet18", "cifar10")
    assert named == ("resnet18", "cifar10")


def test_published_curves_of_the_right_net(resnet18, page_of) -> None:
    page, _ = page_of(resnet18, baseline=76.04)
    assert "ResNet18 on CIFAR-100" in page.text
    for metric in (published.ACCURACY, published.RELATIVE):
        for curve in published.curves("resnet18", "cifar100", metric):
            for relus, percent in curve.points:
                assert [curve.method, f"{relus:,}", f"{percent:.2f}"] in [r[:3] for r in page.rows]
    methods = {row[0] for row in page.rows}
    assert {"SNL", "DeepReDuce", "CryptoNAS", "Sphynx", "SENet", "AutoReP", "BCD"} <= methods
    tiny = {f"{n:,}" for c in published.curves("resnet18", "tiny-imagenet") for n, _ in c.points}
    others = {f"{n:,}" for c in published.curves("resnet18", "cifar100") for n, _ in c.points}
    shown = {row[1] for row in page.rows if row[0] == "SNL"}
    assert shown <= others
    assert not shown & (tiny - others)


def test_published_curves_by_name(finished, page_of) -> None:
    page, _ = page_of(finished)
    assert "Nothing published stands beside it" in page.text
    page, _ = page_of(finished, arch="wide_resnet22_8", data="cifar10")
    assert "Wide-ResNet-22-8 on CIFAR-10" in page.text
    assert ["SNL", "50,000", "92.85", "Table 3"] in page.rows
    page, _ = page_of(finished, arch="resnet20", data="cifar10")
    assert "The paper has no such curve for ResNet-20 on CIFAR-10" in page.text


# ------------------------------------------------------------------------------- the page


def test_numbers_are_those_of_the_history(finished, page_of) -> None:
    page, _ = page_of(finished)
    for r in records(finished):
        row = next(row for row in page.rows if row[0] == str(r["number"]) and len(row) == 11)
        wanted = [f"{r['after']:,}", f"{r['drc']:,}", str(r["tried"]), f"no. {r['chosen']}"]
        wanted += ["yes" if r["accepted"] else "no", f"{r['base_accuracy']:.2f}"]
        wanted += [f"{r['chosen_accuracy']:.2f}", f"{r['test_accuracy']:.2f}", r["engine"]]
        assert row[1:10] == wanted
        assert float(row[10]) == pytest.approx(sum(r["seconds"].values()), abs=0.06)
    last = records(finished)[-1]
    assert page.row("ReLUs kept")[1] == "8 of 98 (8.16%)"
    assert page.row("test accuracy")[1] == f"{last['test_accuracy']:.2f} %"
    assert page.row("hypotheses tried")[1] == str(sum(r["tried"] for r in records(finished)))


def test_masks_and_cost_are_those_of_the_run(finished, page_of) -> None:
    page, _ = page_of(finished)
    counts = fastbcd.masks(small_run(finished).model).counts()
    for name, kept in counts.items():
        assert page.row(name)[3] == str(kept)
    for protocol in fastbcd.private.PROTOCOLS:
        assert [row[2] for row in page.rows if row[0] == protocol][:2] == ["98", "8"]
    kept = fastbcd.MaskSet.full({"2": (2, 7, 7)}).without(range(90))
    cost = fastbcd.private.cost(kept, "crypten", 1e9, 1e-3)
    row = next(row for row in page.rows if row[:2] == ["crypten", "now"])
    assert row[3] == f"{cost.bytes / 1000:.2f} kB"


def test_a_page_needs_nothing_else(stages, tmp_path, drawn) -> None:
    page, folder = Page(report.write([stages], tmp_path)), tmp_path
    source = re.sub(r'src="data:[^"]*"', "", page.source)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", source)
    assert not page.tags & {"script", "iframe", "object", "embed", "video", "audio", "base"}
    assert not re.search(r"\son[a-z]+=", source)
    assert all(address.startswith("data:") for address in page.addresses)
    assert "viewport" in page.source
    files = {p.read_bytes() for p in folder.glob("*.png")}
    shown = [base64.b64decode(i["src"].partition("base64,")[2]) for i in page.images]
    assert len(shown) == len(files) == 7
    assert set(shown) == files
    assert all(content.startswith(PNG) for content in shown)
    assert all(len(i["alt"]) > 20 for i in page.images)


def test_the_same_run_gives_the_same_page(stages, tmp_path) -> None:
    one, two = (report.write([stages], tmp_path / name) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_a_chain_knows_its_start_and_baseline(stages, page_of) -> None:
    page, _ = page_of(stages)
    dense = records(stages / "1-dense")[-1]["test_accuracy"]
    assert page.row("dense accuracy")[1] == f"{dense:.2f} %"
    assert page.row("start")[1].startswith("SNL, 60 ReLUs")
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Accuracy relative"))
    last = records(stages / "3-bcd")[-1]["test_accuracy"]
    assert alt.endswith(f"to {100 * last / dense:.2f} % at 20 ReLUs")
    ious = [r["iou"] for r in records(stages / "2-snl") if r.get("iou") is not None]
    assert f"the next score at least {min(ious):.3f}" in page.text


def test_a_dense_run_beside_it_is_the_baseline(finished, tmp_path) -> None:
    data = fastbcd.load("fashion-mnist-mini").first(48)
    dense = tmp_path / "dense"
    fastbcd.train(
        small_net(), data, epochs=1, test=data.first(20), run_dir=dense, batch_size=16
    )  # fmt: skip
    page = Page(report.write([finished, dense], tmp_path / "out"))
    accuracy = f"{records(dense)[-1]['test_accuracy']:.2f} %"
    assert page.row("dense accuracy")[1:] == [accuracy, accuracy]
    page = Page(report.write([finished], tmp_path / "out"))
    assert page.row("dense accuracy")[1] == "not measured"
    assert "give --baseline" in page.text
    other = fastbcd.train(
        small_net(), data, epochs=1, test=data.first(19), run_dir=tmp_path / "other", batch_size=16
    )  # fmt: skip
    assert other.history
    page = Page(report.write([finished, tmp_path / "other"], tmp_path / "out"))
    assert page.row("dense accuracy")[1] == "not measured", "measured on other images"


def test_starting_points_and_dense_nets_alone(stages, page_of) -> None:
    page, _ = page_of(stages / "2-snl", stages / "1-dense")
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Test accuracy"))
    final = records(stages / "2-snl")[-1]["accuracy"]["final"]
    dense = records(stages / "1-dense")[-1]["test_accuracy"]
    assert f"start (SNL), 2-snl: {final:.2f} % at 60 ReLUs" in alt
    assert f"dense, 1-dense: {dense:.2f} % at 98 ReLUs" in alt
    assert "Steps" not in page.words


def test_an_unfinished_run_says_so_first(cut_short, page_of) -> None:
    page, _ = page_of(cut_short)
    begin = page.source.index("<h1>")
    assert begin < page.source.index("step 2 of about 5") < page.source.index("<section>")
    assert page.row("state")[1] == "not finished"
    assert len(page.images) == 6


def test_several_runs(finished, cut_short, page_of) -> None:
    page, folder = page_of(finished, cut_short)
    iou = read(finished).last.masks.iou(read(cut_short).last.masks)
    assert page.row("whole")[1:] == ["8", "1.000", f"{iou:.3f}"]
    assert {"1-steps.png", "2-steps.png", "accuracy.png"} <= {p.name for p in folder.iterdir()}
    assert page.row("state")[1:] == ["finished", "not finished"]


def test_without_a_test_set_nothing_published_is_drawn(tmp_path) -> None:
    small_run(tmp_path / "run", test=None)
    written = report.write([tmp_path / "run"], tmp_path / "out", arch="resnet18", data="cifar10")
    page = Page(written)
    assert "No test set was given" in page.text
    assert not [row for row in page.rows if row[0] == "SNL"]
    assert page.row("test accuracy")[1] == "not measured"


def test_down_to_no_relus_at_all(tmp_path, drawn) -> None:
    small_run(tmp_path / "run", budget=0, finetune=None)
    page = Page(report.write([tmp_path / "run"], tmp_path / "out"))
    assert "1 of 1 sites keep none" in page.text
    assert "Emptied sites, whose rounds are saved: 2." in page.text


def test_names_are_escaped(finished, tmp_path) -> None:
    place = tmp_path / "<b>&run"
    shutil.copytree(finished, place)
    page = Page(report.write([place], tmp_path / "out"))
    assert "b" not in page.tags
    assert "<b>&run" in page.text


# ------------------------------------------------------------------------------- bad input


def test_what_is_no_run(finished, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"format": "theirs 2"}')
    cases: list[tuple[Path, type[Exception], str]] = [
        (tmp_path / "none", FileNotFoundError, "there is nothing at"),
        (finished / "config.json", NotADirectoryError, "is a file; name the run directory"),
        (tmp_path / "empty", ValueError, "holds no run that has begun"),
        (tmp_path / "text", ValueError, "not readable as JSON"),
        (tmp_path / "other", ValueError, "'theirs 2'; expected one of"),
    ]
    for path, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            report.write([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_states_are_refused(finished, tmp_path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    state = tmp_path / "run" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged.*state\.previous\.safetensors, is whole"):
        report.write([tmp_path / "run"], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": 0.0}, "baseline=0.0"),
        ({"baseline": float("nan")}, "baseline=nan"),
        ({"arch": "resnet81"}, "arch='resnet81'; choose from resnet18"),
        ({"data": "mnist"}, "data='mnist'; choose from cifar10"),
        ({"network": report.Network(bandwidth=0)}, "bandwidth=0"),
    ],
)
def test_bad_options(finished, tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        report.write([finished], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="at least one run"):
        report.write([], tmp_path / "out")


def test_where_nothing_can_be_written(finished, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        report.write([finished], tmp_path / "file")
    with pytest.raises(OSError, match="cannot write into"):
        report.write([finished], tmp_path / "file" / "under")
    assert cli.main(["report", str(finished), "--out", "/proc/report"]) == 2
    assert "cannot write into /proc/report" in capsys.readouterr().err


def test_without_matplotlib(finished, tmp_path, monkeypatch, capsys) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["report", str(finished), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'fastbcd[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------- the command


def test_the_command(stages, tmp_path, capsys) -> None:
    shutil.copytree(stages, tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run"), "--rtt", "40ms"]) == 0
    page = tmp_path / "run" / "report" / "report.html"
    assert f"{page}: open it in a browser; the 7 figures" in capsys.readouterr().out
    assert "round trip 40.0 ms" in page.read_text(encoding="utf-8")
    assert read(tmp_path / "run").bcd.done, "the report is no stage"
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastbcd report: there is nothing at")
    assert error.count("\n") == 1
