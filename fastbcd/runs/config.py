"""config.json and records: one table of fields checks what is read, whatever version wrote it.

Version 2 stores facts as fields (see `fingerprint.run_config`). Version 1 had one line of text for
each data set and no architecture; `read_config` returns it in the form of version 2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastbcd import models
from fastbcd.masking.masks import masks

KINDS = {"fastbcd.run": "bcd", "fastbcd.dense": "dense", "fastbcd.snl": "snl",
         "fastbcd.autorep": "autorep", "fastbcd.deepreduce": "deepreduce",
         "fastbcd.senet": "senet", "fastbcd.relupruner": "relupruner"}  # fmt: skip
RECIPE = "fastbcd.recipe"
MISSING = "(missing)"
TARGETS = ("seconds", "bytes", "rounds")  # one of them is in a budget that is a cost
# Facts that do not decide the outcome and may differ on resuming. settings.watch: units whose
# values SNL once recorded in every epoch.
NOT_COMPARED = ("fastbcd", "data.name", "test.name", "net.arch", "settings.watch")

# The types of a field's value, or the fields of the object that it holds. "*": any other field.
NUMBER, SIZE = "int or float", ("images", "channels", "height", "width", "classes")
_DATA: dict[str, Any] = {
    "name": "str or null", **dict.fromkeys(SIZE, "int or null"), "images": "int", "dtype": "str",
    "digest": "str", "mean": "list", "std": "list",
}  # fmt: skip
_START = {"budget": "int or dict", "seed": "int"}
_SETTINGS: dict[str, Any] = {
    "bcd": {**_START, "drc": "int or str or dict", "rt": "int", "adt": NUMBER,
            "samples": "int or null", "proposal": "str or dict"},
    "dense": {"epochs": "int", "seed": "int"}, "snl": _START, "autorep": _START,
    "deepreduce": _START, "senet": _START, "relupruner": _START,
}  # fmt: skip
_NET = {"arch": "dict or null", "sites": {"*": "list"}, "tensors": "dict"}
_STEP: dict[str, Any] = {
    **dict.fromkeys(("number", "before", "after", "drc", "tried", "chosen"), "int"),
    **dict.fromkeys(("base_accuracy", "base_loss", "chosen_accuracy", "chosen_loss"), NUMBER),
    **dict.fromkeys(("train_loss", "test_accuracy"), f"{NUMBER} or null"),
    "accepted": "bool", "engine": "str", "drops": {"*": NUMBER}, "seconds": {"*": NUMBER},
}  # fmt: skip
_NEW_STEP: dict[str, Any] = {  # those that not every record has
    "sites": "list or null", "epochs": NUMBER, "returned": "int", "cost": NUMBER,
    "images": {"*": "int"}, "interval": "list",
}  # fmt: skip
_EPOCH: dict[str, Any] = {  # those that an epoch's record has
    **dict.fromkeys(("number", "count", "epoch"), "int"), "phase": "str", "loss": NUMBER,
    "lr": NUMBER, "test_accuracy": f"{NUMBER} or null", "accuracy": {"*": NUMBER},
    "seconds": {"*": NUMBER},
}  # fmt: skip

_OLD_DATA = re.compile(r"ImageData\((\d+) × (\d+)×(\d+)×(\d+) (\w+), (\d+) classes, \S+\) (\w+)")
_OLD_NAMES: dict[tuple[int, ...], str] = {
    (50_000, 3, 32, 32, 10): "cifar10", (50_000, 3, 32, 32, 100): "cifar100",
    (100_000, 3, 64, 64, 200): "tiny-imagenet", (8_000, 1, 28, 28, 10): "fashion-mnist-mini",
}  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """The checked contents of a folder's config.json, in the form of version 2."""
    path = folder / "config.json"
    config = parse(path.read_bytes(), str(path))
    check(config, {"format": "str"}, str(path))
    if kind_of(config) == RECIPE:
        check(config, {"recipe": "dict"}, str(path))
        return config
    if kind_of(config) not in KINDS or version(config) not in (1, 2):
        raise ValueError(
            f"{path}: format is {config['format']!r}; expected one of {', '.join(KINDS)}, "
            f"version 1 or 2"
        )
    data = _DATA
    if version(config) == 1:  # mean and std are in its digest only
        config = _from_version_1(config, str(path))
        data = {name: types for name, types in _DATA.items() if name not in ("mean", "std")}
    test = "null" if config.get("test") is None else data
    settings = _SETTINGS[KINDS[kind_of(config)]]
    check(config, {"settings": settings, "data": data, "test": test, "net": _NET}, str(path))
    if isinstance(budget := config["settings"].get("budget"), dict):
        quantity = next((q for q in TARGETS if q in budget), "seconds")
        relus = {"relus": "int"} if "relus" in budget else {}
        check(budget, {quantity: NUMBER, **relus}, str(path), "settings.budget")
    for name, shape in config["net"]["sites"].items():
        if any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{path}: net.sites.{name} is {_short(shape)}; expected a shape")
    return config


def check_record(record: Any, kind: str, where: str) -> None:
    """Refuse a record of a history that has missing, mistyped or unknown fields."""
    check(record, {"number": "int"}, where)
    needed, optional = (_STEP, _NEW_STEP) if kind == "bcd" else ({}, _EPOCH)
    check(record, {**needed, **{k: optional[k] for k in optional if k in record}}, where)
    unknown = sorted(record.keys() - needed.keys() - optional.keys()) if needed else []
    if unknown:
        raise ValueError(f"{where}: {unknown[0]!r} is not a field of a step's record")
    if not all(key.isdecimal() for key in record.get("drops", {})):
        raise ValueError(f"{where}: drops has a key that is no hypothesis's number")


def check(value: Any, fields: Any, where: str, name: str = "") -> None:
    """Refuse a JSON object that lacks one of the fields or has one of another type."""
    types = "dict" if isinstance(fields, dict) else fields
    if type(value).__name__.replace("NoneType", "null") not in types.split(" or "):
        raise ValueError(f"{where}: {name or 'it'} is {_short(value)}; expected {types}")
    if isinstance(fields, dict):
        fields = dict.fromkeys(value, fields["*"]) if "*" in fields else fields
        for key, inner in fields.items():
            dotted = f"{name}.{key}" if name else key
            if key not in value:
                raise ValueError(f"{where}: {dotted} is missing")
            check(value[key], inner, where, dotted)


def parse(content: bytes, where: str) -> Any:
    """The JSON value in `content`; ValueError if it is none."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable as JSON: {error}") from error


def kind_of(config: dict[str, Any]) -> str:
    """The format's name, without the number after it."""
    return config["format"].rpartition(" ")[0]


def version(config: dict[str, Any]) -> int:
    """The number after the format's name; 0 if there is none."""
    number = config["format"].rpartition(" ")[2]
    return int(number) if number.isdecimal() else 0


def _from_version_1(config: dict[str, Any], where: str) -> dict[str, Any]:
    """A configuration of version 1 in the form of version 2; the format still says 1."""
    config = dict(config)
    for name in ("data", "test"):
        if config.get(name) is not None:
            found = _OLD_DATA.fullmatch(text := str(config[name]))
            if found is None:
                raise ValueError(f"{where}: {name} is {_short(text)}; expected ImageData(…)")
            *sizes, dtype, classes, mark = found.groups()
            size = tuple(map(int, (*sizes, classes)))
            facts = {"name": _OLD_NAMES.get(size), **dict(zip(SIZE, size, strict=True))}
            config[name] = {**facts, "dtype": dtype, "digest": mark}
    if isinstance(config.get("net"), dict) and config.get("data") is not None:
        config["net"] = {"arch": _old_arch(config["data"], config["net"]), **config["net"]}
    return config


def _old_arch(data: dict[str, Any], net: dict[str, Any]) -> dict[str, Any] | None:
    """The network of fastbcd.models that has the sites of a run of version 1."""
    # Its coefficients are those of quadratics: lines are newer.
    poly = any(str(name).endswith(".coef") for name in net.get("tensors", ()))
    for name in models.NAMES:
        arch = {
            "name": name, "num_classes": data["classes"], "image_size": data["height"],
            "in_channels": data["channels"], "replacement": "poly" if poly else "identity",
        }  # fmt: skip
        try:
            with torch.device("meta"):
                sites = masks(models.build(**arch)).sites
        except (ValueError, RuntimeError, ArithmeticError):  # no net takes such images
            continue
        if {site.name: list(site.shape) for site in sites} == net.get("sites"):
            return arch
    return None


def check_same_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The folder's configuration; if it is of another run, an error names the first difference."""
    old = read_config(folder)
    same_kind = kind_of(old) == kind_of(config)
    translated = {**old, "format": config["format"]} if same_kind else old
    for name, before, now in differences(translated, config):
        raise ValueError(
            f"{folder} holds another run: {name} is {before} there and {now} now; "
            f"name another run_dir, or repeat the call with the settings of that run"
        )
    return old


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, old value, new value) wherever two JSON values differ in what decides an outcome."""
    if name in NOT_COMPARED:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
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
