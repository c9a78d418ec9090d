"""config.json: what a run is. Read and checked in one place, whatever version wrote it.

Version 2 stores facts as fields (see `fingerprint.run_config`). Version 1 had one line of text for
each data set and no architecture; `read_config` returns it in the form of version 2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastbcd.runs.version_1 import add_names

KINDS = {"fastbcd.run": "bcd", "fastbcd.dense": "dense", "fastbcd.snl": "snl",
         "fastbcd.autorep": "autorep"}  # fmt: skip
RECIPE = "fastbcd.recipe"
MISSING = "(missing)"
# Facts that do not decide the outcome and may differ on resuming. settings.watch: units whose
# values SNL once recorded in every epoch.
NOT_COMPARED = ("fastbcd", "data.name", "test.name", "net.arch", "settings.watch")

# Schemas: a field's types, or the schema of the object that it holds.
NULL, NUMBER = (type(None),), (int, float)
_DATA: dict[str, Any] = {
    "name": (str, *NULL), "images": (int,), "channels": (int, *NULL), "height": (int, *NULL),
    "width": (int, *NULL), "classes": (int, *NULL), "dtype": (str,),
    "mean": (list,), "std": (list,), "digest": (str,),
}  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "bcd": {"budget": (int,), "drc": (int, str, dict), "rt": (int,), "adt": NUMBER,
            "seed": (int,), "samples": (int, *NULL), "proposal": (str, dict)},
    "dense": {"epochs": (int,), "seed": (int,)},
    "snl": {"budget": (int,), "seed": (int,)},
    "autorep": {"budget": (int,), "seed": (int,)},
}  # fmt: skip
_NET = {"arch": (dict, *NULL), "sites": (dict,), "tensors": (dict,)}
_STEP: dict[str, Any] = {
    "number": (int,), "before": (int,), "after": (int,), "drc": (int,), "tried": (int,),
    "chosen": (int,), "accepted": (bool,), "drops": (dict,), "base_accuracy": NUMBER,
    "base_loss": NUMBER, "chosen_accuracy": NUMBER, "chosen_loss": NUMBER, "engine": (str,),
    "train_loss": (*NUMBER, *NULL), "test_accuracy": (*NUMBER, *NULL), "seconds": (dict,),
}  # fmt: skip
_EPOCH: dict[str, Any] = {  # those that an epoch's record has
    "number": (int,), "count": (int,), "epoch": (int,), "loss": NUMBER, "lr": NUMBER,
    "phase": (str,), "accuracy": (dict,), "test_accuracy": (*NUMBER, *NULL), "seconds": (dict,),
}  # fmt: skip
_OLD_DATA = re.compile(r"ImageData\((\d+) × (\d+)×(\d+)×(\d+) (\w+), (\d+) classes, \S+\) (\w+)")


def read_config(folder: Path) -> dict[str, Any]:
    """The checked contents of a folder's config.json, in the form of version 2."""
    path = folder / "config.json"
    config = parse(path.read_bytes(), str(path))
    check(config, {"format": (str,)}, str(path))
    kind = config["format"].rpartition(" ")[0]
    if kind == RECIPE:
        check(config, {"recipe": (dict,)}, str(path))
        return config
    if kind not in KINDS or version(config) not in (1, 2):
        raise ValueError(
            f"{path}: format is {config['format']!r}; expected one of {', '.join(KINDS)}, "
            f"version 1 or 2"
        )
    data = _DATA
    if version(config) == 1:
        config = _translate(config, str(path))
        data = {k: v for k, v in _DATA.items() if k not in ("mean", "std")}
    test = NULL if config.get("test") is None else data
    settings = _SETTINGS[KINDS[kind]]
    check(config, {"settings": settings, "data": data, "test": test, "net": _NET}, str(path))
    for name, shape in config["net"]["sites"].items():
        if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{path}: net.sites.{name} is {_short(shape)}; expected a shape")
    if version(config) == 1:
        add_names(config)
    return config


def check_record(record: Any, kind: str, where: str) -> None:
    """Refuse a record of a history that has missing, mistyped or unknown fields."""
    check(record, {"number": (int,)}, where)
    fields = _STEP if kind == "bcd" else {k: v for k, v in _EPOCH.items() if k in record}
    check(record, fields, where)
    for name in ("drops", "seconds", "accuracy"):
        values = record.get(name, {})
        check(values, dict.fromkeys(values, NUMBER), where, f"{name}.")
    unknown = min(record.keys() - _STEP.keys(), default=None) if kind == "bcd" else None
    if unknown is not None:
        raise ValueError(f"{where}: {unknown!r} is not a field of a step's record")
    if not all(key.isdecimal() for key in record.get("drops", {})):
        raise ValueError(f"{where}: drops has a key that is no hypothesis's number")


def check(value: Any, schema: dict[str, Any], where: str, name: str = "") -> None:
    """Refuse a JSON object that lacks a field of the schema or has one of another type.

    >>> check({"rt": "many"}, {"rt": (int,)}, "config.json")
    Traceback (most recent call last):
    ValueError: config.json: rt is "many"; expected int
    """
    if type(value) is not dict:
        raise ValueError(f"{where}: {name[:-1] or 'it'} is {_short(value)}; expected dict")
    for key, kinds in schema.items():
        if key not in value:
            raise ValueError(f"{where}: {name}{key} is missing")
        if isinstance(kinds, dict):
            check(value[key], kinds, where, f"{name}{key}.")
        elif type(value[key]) not in kinds:
            expected = " or ".join(k.__name__ for k in kinds).replace("NoneType", "null")
            raise ValueError(f"{where}: {name}{key} is {_short(value[key])}; expected {expected}")


def parse(content: bytes, where: str) -> Any:
    """The JSON value in `content`; ValueError if it is none."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable as JSON: {error}") from error


def version(config: dict[str, Any]) -> int:
    """The number after the format's name; 0 if there is none.

    >>> version({"format": "fastbcd.run 2"})
    2
    """
    number = config["format"].rpartition(" ")[2]
    return int(number) if number.isdecimal() else 0


def _translate(config: dict[str, Any], where: str) -> dict[str, Any]:
    """A configuration of version 1 in the form of version 2; the format still says 1."""
    config = dict(config)
    for name in ("data", "test"):
        if config.get(name) is None:
            continue
        found = _OLD_DATA.fullmatch(str(config[name]))
        if found is None:
            raise ValueError(f"{where}: {name} is {_short(config[name])}; expected ImageData(…)")
        images, channels, height, width, dtype, classes, mark = found.groups()
        config[name] = {
            "name": None, "images": int(images), "channels": int(channels), "height": int(height),
            "width": int(width), "classes": int(classes), "dtype": dtype, "digest": mark,
        }  # fmt: skip
    if isinstance(config.get("net"), dict):
        config["net"] = {"arch": None, **config["net"]}
    return config


def check_same_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The folder's configuration; if it is of another run, an error names the first difference."""
    old = read_config(folder)
    same_kind = old["format"].rpartition(" ")[0] == config["format"].rpartition(" ")[0]
    translated = {**old, "format": config["format"]} if same_kind else old
    for name, before, now in differences(translated, config):
        raise ValueError(
            f"{folder} holds another run: {name} is {before} there and {now} now; "
            f"name another run_dir, or repeat the call with the settings of that run"
        )
    return old


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, old value, new value) wherever two JSON values differ in what decides an outcome.

    >>> list(differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}))
    [('a.b', '1', '3')]
    """
    if name in NOT_COMPARED:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            # Version 1 has mean and std in its digest only.
            if key in old or key not in ("mean", "std"):
                inner = f"{name}.{key}" if name else key
                yield from differences(old.get(key, MISSING), new.get(key, MISSING), inner)
    elif old != new and json.dumps(old) != json.dumps(new):  # the second for NaN
        before, now = (v if v is MISSING else json.dumps(v, ensure_ascii=False) for v in (old, new))
        yield name, before, now


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a value nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}…"
