"""README and docs are true: their code runs, their commands parse, their files exist."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastbcd
from fastbcd.cli import main as cli
from helpers import published_nets, stand_in_lightning
from test_imports import GRAPH, LAYERS, ROOMS, layer

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "examples/README.md",
    ]
}
README, CONTRIBUTING = PAGES["README.md"], PAGES["CONTRIBUTING.md"]
CODE = {
    page: blocks
    for page, text in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
}
LINES = [
    line
    for text in PAGES.values()
    for line in re.findall(r"^    (.*?)(?:\s+#.*)?$", text, re.MULTILINE)
]
COMMANDS = [
    re.sub(r"^torchrun .* -m ", "", line)
    for line in LINES
    if re.match(r"fastbcd |torchrun .* -m fastbcd ", line)
]

# What each page with Python code must have printed; None is a page that prints nothing of note.
PRINTED = {
    "README.md": ["5,000 of 28,224 ReLUs", "step 2: 4,500 → 4,000 ReLUs"],
    "docs/index.md": ["20,000 of 47,104 ReLUs"],
    "docs/metrics.md": [" % of the pixels", "drops in percentage points", "3000 ReLUs"],
    "docs/parts.md": ["AutoReP", "30000 2\n", "Run(10,000 of "],
    "docs/private-cost.md": ["crypten, 1.00 Gbit/s"],
    "docs/training-code.md": ["% of 64 images", "step 1: ", "1700 ReLUs in the average"],
}


def test_every_page_with_code_is_tested() -> None:
    assert CODE.keys() == PRINTED.keys()


@pytest.mark.parametrize("page", PRINTED)
def test_the_code_runs(page, torchvision, tmp_path, monkeypatch, capsys) -> None:
    """All Python blocks of a page, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(2, 10)
    if "load_snl" in "".join(CODE[page]):
        for name, net in (("snl_best_checkpoint", "snl"), ("autorep_best", "autorep")):
            theirs = getattr(published_nets, net)("resnet18")
            torch.save({"state_dict": theirs.state_dict()}, f"{name}.pth.tar")
    monkeypatch.setitem(sys.modules, "lightning", stand_in_lightning)
    whole = fastbcd.load
    monkeypatch.setattr(fastbcd, "load", lambda *names: whole(*names).first(64))
    trained: list[int] = []
    names = {
        "images": images,
        "data": (images, labels),
        "model": torchvision.models.resnet18(num_classes=10),
        "train_my_way": trained.append,
    }
    for block in CODE[page]:
        exec(re.sub(r"epochs=\d\d", "epochs=2", block), names)
    out = capsys.readouterr().out
    assert [text for text in PRINTED[page] if text not in out] == [], out
    assert len(trained) == 2 * ("train_my_way" in "".join(CODE[page]))
    if "net.pt2" in "".join(CODE[page]):
        assert Path("net.pt2").stat().st_size > 0


# ---------------------------------------------------------------------------------- the README


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1000
    assert len(CODE["README.md"][0].splitlines()) <= 10


def test_terms_are_defined() -> None:
    for term in ("site", "mask", "budget", "hypothesis", "DRC", "RT", "ADT", "teacher"):
        assert f"| {term} |" in PAGES["docs/concepts.md"], term
    assert "[concepts](docs/concepts.md)" in README


def test_the_headline_is_in_the_results() -> None:
    """The speed-ups of the first table, rounded to two digits."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    said = re.search(r"^\| faster than the authors' code \|(.*)\|$", README, re.MULTILINE)
    assert said
    measured = [
        re.search(rf"image: resnet18, {count} ReLUs, D = 100 +[\d.]+ +([\d.]+)x", results)
        for count in ("6,000", "15,000", "30,000")
    ]
    assert all(measured)
    expected = [f"{float(found[1]):.2g}" for found in measured if found]
    assert re.findall(r"([\d.]+)×", said[1]) == expected


# ------------------------------------------------------------------------- commands and links


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_parse(line) -> None:
    cli.parser().parse_args(shlex.split(line)[1:])


def test_every_command_is_shown() -> None:
    """Some commands have two words."""
    shown = [line.split() for line in COMMANDS]
    hidden = []
    for name in cli.COMMANDS:
        words = name.split()
        if all(line[1 : 1 + len(words)] != words for line in shown):
            hidden.append(name)
    assert hidden == []


def test_scripts_exist() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"\bbenchmarks/\w+\.py", text)}
    assert len(named) > 3
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_targets_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        target
        for text in PAGES.values()
        for target in re.findall(r"(?:^    |`)make ([\w-]+)", text, re.MULTILINE)
    }
    assert {"demo", "test", "test-all", "bench", "lint"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_ci_runs_make_test() -> None:
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize("page", PAGES)
def test_the_links_lead_somewhere(page) -> None:
    for link in re.findall(r"(?:\]\(|<img src=\")([^)#\"]+)", PAGES[page]):
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_name_files_that_exist(page) -> None:
    """Paths in backticks such as `fastbcd/ops/reference.py`."""
    for name in re.findall(r"`((?:fastbcd|kernels|tests|docs)/[\w/.]+)`", PAGES[page]):
        assert (ROOT / name).exists(), name


# -------------------------------------------------------------------- the reference of the parts


def test_the_table_of_ops_is_that_of_their_docstrings() -> None:
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| `(.*?)`", PAGES["docs/parts.md"], re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(fastbcd.ops.__all__)
    for name, arguments, equivalent in rows:
        op = getattr(fastbcd.ops, name)
        assert f"Equivalent to: {equivalent}\n" in op.__doc__
        mine = [a for a in arguments.split(", ") if a != "*"]
        assert list(inspect.signature(op).parameters)[: len(mine)] == mine


def test_the_table_of_arguments_is_that_of_bcd() -> None:
    section = PAGES["docs/parts.md"].split("## Descend")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"\w+", row)]
    mine = list(inspect.signature(fastbcd.bcd).parameters)
    assert sorted(named) == sorted(set(mine) - {"net", "data", "budget", "progress"})


# -------------------------------------------------------------------- the map in CONTRIBUTING


def section(title: str) -> str:
    """The fenced block below a heading of CONTRIBUTING."""
    return CONTRIBUTING.split(f"\n## {title}\n")[1].split("```")[1]


def test_the_map_lists_every_room() -> None:
    named = re.findall(r"^ {2}(\w+)/ ", section("Rooms"), re.MULTILINE)
    assert sorted(named) == ROOMS


def test_the_tour_names_files_that_exist() -> None:
    tour = CONTRIBUTING.split("\n## The tour\n")[1].split("\n## ")[0]
    named = re.findall(r"`(\w+/[\w/]+\.(?:py|cpp))`", tour)
    assert len(named) > 10
    assert [n for n in named if not any((ROOT / r / n).exists() for r in (".", "fastbcd"))] == []


def test_the_walk_below_the_tour_never_goes_back_up() -> None:
    """Each file is imported, directly or through one file, by one before it."""
    walk = CONTRIBUTING.split("\nBelow `decide`")[1].split("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", walk)
    python = [f"fastbcd.{name[:-3].replace('/', '.')}" for name in files]
    assert len(python) > 5
    layers = [layer(name, LAYERS) for name in python]
    assert layers == sorted(layers)
    imported = set()
    for earlier, name in pairwise(["fastbcd.descent.search", *python]):
        imported |= GRAPH[earlier].union(*(GRAPH[name] for name in GRAPH[earlier]))
        assert name in imported, name
