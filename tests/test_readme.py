"""What the README says is true: its code runs, its commands parse, its files are there."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

import fastbcd
from fastbcd.cli import main as cli
from helpers import published_nets

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LINES = re.findall(r"^    (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
COMMANDS = [
    re.sub(r"^torchrun .* -m ", "", line)
    for line in LINES
    if re.match(r"fastbcd |torchrun .* -m fastbcd ", line)
]


def test_the_code_runs(torchvision, tmp_path, monkeypatch, capsys) -> None:
    """All blocks of Python as they stand, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(2, 10)
    for name, net in (("snl_best_checkpoint", "snl"), ("autorep_best", "autorep")):
        theirs = getattr(published_nets, net)("resnet18")
        torch.save({"state_dict": theirs.state_dict()}, f"{name}.pth.tar")
    trained: list[int] = []
    names = {"images": images, "data": (images, labels), "train_my_way": trained.append}
    code = [block for language, block in BLOCKS if language == "python"]
    for block in code:
        exec(block, names)
    out = capsys.readouterr().out
    assert len(code) == 4
    assert "MaskSet: 20,000 of 47,104 ReLUs kept" in out
    assert len(trained) == 2
    assert "step 2: 19,500 → 19,000 ReLUs" in out
    assert "AutoReP" in out
    assert "crypten, 1.00 Gbit/s" in out
    assert Path("net.pt2").stat().st_size > 0


class Parsed(Exception):
    """The command's own parser took the whole line."""


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_parse(line, monkeypatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, arguments=None, namespace=None):
        options = parse(parser, arguments, namespace)
        if parser.prog != "fastbcd":
            raise Parsed
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        cli.main(shlex.split(line)[1:])


def test_every_command_is_there() -> None:
    """In a line of its own, or named with the way to install or to try."""
    shown = {shlex.split(line)[1] for line in COMMANDS}
    assert cli.COMMANDS.keys() - shown <= {"demo", "autorep", "info"}


def test_the_targets_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    texts = [README, (ROOT / "CONTRIBUTING.md").read_text()]
    targets = {
        target for text in texts for target in re.findall(r"(?:^    |`)make (\w+)", text, re.M)
    }
    assert {"demo", "test", "bench", "lint"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_links_lead_somewhere(page) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_table_of_ops_is_that_of_their_docstrings() -> None:
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| `(.*?)`", README, re.MULTILINE)
    assert [name for name, _, _ in rows] == [
        "masked_relu", "masked_poly", "soft_relu", "indicator_poly"
    ]  # fmt: skip
    for name, arguments, equivalent in rows:
        op = getattr(fastbcd.ops, name)
        assert f"Equivalent to: {equivalent}\n" in op.__doc__
        mine = [a for a in arguments.split(", ") if a != "*"]
        assert list(inspect.signature(op).parameters)[: len(mine)] == mine


def test_the_layout_names_every_file_once() -> None:
    tree = next(block for language, block in BLOCKS if block.startswith("fastbcd/"))
    package = tree[: tree.index("\nkernels/")]
    named = re.findall(r"\b(\w+\.py|\w+/)", package)[1:]
    there = {p.name for p in (ROOT / "fastbcd").glob("*.py")} - {"__init__.py", "__main__.py"}
    there |= {f"{p.parent.name}/" for p in (ROOT / "fastbcd").glob("*/__init__.py")}
    assert sorted(named) == sorted(there)
