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

import torch

from fastbcd import models
from fastbcd.masking.masks import masks

KINDS = {"fastbcd.run": "bcd", "fastbcd.dense": "dense", "fastbcd.snl": "snl",
         "fastbcd.autorep": "autorep"}  # fmt: skip
RECIPE = "fastbcd.recipe"
MISSING = "(missing)"
# Facts that help to read a run but do not decide its outcome: they may differ on resuming.
# settings.watch: units whose values SNL once recorded in every epoch.
NOT_COMPARED = ("fastbcd", "data.name", "test.name", "net.arch", "settings.watch")

_NUMBER = (int, float)
_OPTIONAL = (*_NUMBER, type(None))
_DATA: dict[str, Any] = {
    "name": (str, type(None)), "images": int, "channels": int, "height": int, "width": int,
    "classes": int, "dtype": str, "mean": list, "std": list, "digest": str,
}  # fmt: skip
# Version 1 did not record names: images, channels, height, width and classes of train sets.
_OLD_NAMES: dict[tuple[int, ...], str] = {
    (50_000, 3, 32, 32, 10): "cifar10", (50_000, 3, 32, 32, 100): "cifar100",
    (100_000, 3, 64, 64, 200): "tiny-imagenet", (8_000, 1, 28, 28, 10): "fashion-mnist-mini",
}  # fmt: skip
_OLD_DATA = re.compile(r"ImageData\((\d+) × (\d+)×(\d+)×(\d+) (\w+), (\d+) classes, \S+\) (\w+)")
_SETTINGS: dict[str, dict[str, Any]] = {
    "bcd": {"budget": int, "drc": (int, str, dict), "rt": int, "adt": _NUMBER, "seed": int,
            "samples": (int, type(None)), "proposal": (str, dict)},
    "dense": {"epochs": int, "seed": int},
    "snl": {"budget": int, "seed": int},
    "autorep": {"budget": int, "seed": int},
}  # fmt: skip
_RECORD: dict[str, Any] = {  # of a step of BCD; those of epochs hold some of them and others
    "number": int, "before": int, "after": int, "drc": int, "tried": int, "chosen": int,
    "accepted": bool, "drops": dict, "base_accuracy": _NUMBER, "base_loss": _NUMBER,
    "chosen_accuracy": _NUMBER, "chosen_loss": _NUMBER, "engine": str, "train_loss": _OPTIONAL,
    "test_accuracy": _OPTIONAL, "seconds": dict,
}  # fmt: skip
_EPOCH = {"count": int, "epoch": int, "loss": _NUMBER, "lr": _NUMBER, "phase": str,
          "accuracy": dict, "test_accuracy": _OPTIONAL, "seconds": dict}  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """The checked contents of a folder's config.json, in the form of version 2."""
    path = folder / "config.json"
    config = parse(path.read_bytes(), str(path))
    check_fields(config, {"format": str}, str(path))
    kind = config["format"].rpartition(" ")[0]
    if kind == RECIPE:
        check_fields(config, {"recipe": dict}, str(path))
        return config
    if kind not in KINDS or version(config) not in (1, 2):
        raise ValueError(
            f"{path}: format is {config['format']!r}; expected one of {', '.join(KINDS)}, "
            f"version 1 or 2"
        )
    if version(config) == 1:
        config = _translate(config, str(path))
    fields = {"settings": dict, "data": dict, "test": (dict, type(None)), "net": dict}
    check_fields(config, fields, str(path))
    check_fields(config["settings"], _SETTINGS[KINDS[kind]], f"{path}: settings")
    for name in ("data", "test"):
        if config[name] is not None:
            known = {k: v for k, v in _DATA.items() if version(config) == 2 or k in config[name]}
            check_fields(config[name], known, f"{path}: {name}")
    net = {"arch": (dict, type(None)), "sites": dict, "tensors": dict}
    check_fields(config["net"], net, f"{path}: net")
    for name, shape in config["net"]["sites"].items():
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{path}: net.sites.{name} is {_short(shape)}; expected a shape")
    return config


def check_record(record: dict[str, Any], kind: str, where: str) -> None:
    """Refuse a record of a history that has missing, mistyped or unknown fields."""
    check_fields(record, {"number": int}, where)
    if kind == "bcd":
        check_fields(record, _RECORD, where)
        unknown = min(record.keys() - _RECORD.keys(), default=None)
        if unknown is not None:
            raise ValueError(f"{where}: {unknown!r} is not a field of a step's record")
    else:
        check_fields(record, {k: v for k, v in _EPOCH.items() if k in record}, where)
    for name in ("drops", "seconds", "accuracy"):
        values = record.get(name, {})
        check_fields(values, dict.fromkeys(values, _NUMBER), f"{where}: {name}")
    if any(not key.isdecimal() for key in record.get("drops", {})):
        raise ValueError(f"{where}: drops has a key that is no hypothesis's number")


def check_fields(value: Any, fields: dict[str, Any], where: str) -> None:
    """Refuse a JSON object that lacks one of these fields or has one of another type.

    >>> check_fields({"rt": "many"}, {"rt": int}, "config.json: settings")
    Traceback (most recent call last):
    ValueError: config.json: settings: rt is "many"; expected int
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_short(value)}; expected a JSON object")
    for name, kinds in fields.items():
        if name not in value:
            raise ValueError(f"{where}: {name} is missing")
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value[name]) not in kinds:
            expected = " or ".join(k.__name__ for k in kinds).replace("NoneType", "null")
            raise ValueError(f"{where}: {name} is {_short(value[name])}; expected {expected}")


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
    number = config.get("format", "").rpartition(" ")[2]
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
        size = [int(n) for n in found.group(1, 2, 3, 4, 6)]
        facts = dict(zip(("images", "channels", "height", "width", "classes"), size, strict=True))
        known = _OLD_NAMES.get(tuple(size))
        config[name] = {"name": known, **facts, "dtype": found[5], "digest": found[7]}
    net, data = config.get("net"), config.get("data")
    if isinstance(net, dict):
        config["net"] = {"arch": _old_arch(net, data) if isinstance(data, dict) else None, **net}
    return config


def _old_arch(net: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | None:
    """The net of fastbcd.models that has the sites of a run of version 1."""
    sites, tensors = net.get("sites"), net.get("tensors")
    if not isinstance(sites, dict) or not isinstance(tensors, dict):
        return None
    poly = any(name.endswith(".coef") for name in tensors)
    arch = {
        "num_classes": data["classes"], "image_size": data["height"],
        "in_channels": data["channels"], "replacement": "poly" if poly else "identity",
    }  # fmt: skip
    for name in models.NAMES:
        try:
            with torch.device("meta"):
                made = models.build(name, **arch)
        except (ValueError, RuntimeError, ArithmeticError):  # no net takes such images
            continue
        if {site.name: list(site.shape) for site in masks(made).sites} == sites:
            return {"name": name, **arch}
    return None


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
            inner = f"{name}.{key}" if name else key
            if key in ("mean", "std") and key not in old:
                continue  # version 1 has them in its digest only
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
