"""How long the fuzzers of this folder run, and how a failure is repeated."""

from __future__ import annotations

from itertools import islice

from helpers.hostile import seeds


def test_a_few_fixed_seeds(monkeypatch) -> None:
    monkeypatch.delenv("FASTBCD_HOSTILE_SECONDS", raising=False)
    assert list(seeds(3)) == [0, 1, 2]


def test_random_seeds_while_there_is_time(monkeypatch) -> None:
    monkeypatch.setenv("FASTBCD_HOSTILE_SECONDS", "3600")
    first, second = list(islice(seeds(3), 6)), list(islice(seeds(3), 6))
    assert first[:3] == second[:3] == [0, 1, 2]
    assert first[3:] != second[3:]


def test_a_failure_is_repeated_by_its_seed(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FASTBCD_HOSTILE_SECONDS", "3600")
    last = list(islice(seeds(1), 2))[-1]
    name, seed = capsys.readouterr().out.splitlines()[-1].split("=")
    assert int(seed) == last
    monkeypatch.setenv(name, seed)
    assert list(seeds(3)) == [last]
