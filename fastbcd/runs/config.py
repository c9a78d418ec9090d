"""config.json: what a run is. It is written when a run begins, and compared when it resumes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from fastbcd import models
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import masks
from fastbcd.runs.fingerprint import tensors_of
from fastbcd.runtime.ranks import differences, digest
from fastbcd.runtime.version import __version__

TITLES = {
    "bcd": "BCD",
    "train": "dense",
    "snl": "SNL",
    "autorep": "AutoReP",
    "deepreduce": "DeepReDuce",
    "senet": "SENet",
    "relupruner": "ReLUPruner",
}
CONFIG = "config.json"
VERSION = "3"
SAMPLED = 256  # images whose pixels enter the digest of a data set
# Facts that do not decide the outcome and may differ on resuming.
NOT_COMPARED = ("fastbcd", "data.name", "test.name", "net.arch")


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Size and normalisation of a data set, and a digest of labels and some images."""

    name: str | None
    images: int
    shape: list[int]  # of one image
    dtype: str
    classes: int | None
    mean: list[float]
    std: list[float]
    digest: str


@dataclass(frozen=True, kw_only=True)
class NetFacts:
    """The sites and tensors of a net.

    arch: what `fastbcd.models.build` takes to build it again, or {"model": "module:function"} of
    the command line; None for other nets.
    """

    arch: dict[str, Any] | None
    sites: dict[str, list[int]]
    tensors: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The contents of config.json."""

    format: str  # "fastbcd.", the kind of the run, and the version of the format
    fastbcd: str  # version of the library
    settings: dict[str, Any]
    data: DataFacts
    test: DataFacts | None
    net: NetFacts

    @classmethod
    def of(
        cls,
        kind: str,
        settings: dict[str, Any],
        net: nn.Module,
        *,
        data: ImageData,
        test: ImageData | None,
    ) -> Config:
        """The configuration of a run that is about to begin or to resume."""
        return cls(
            format=f"fastbcd.{kind} {VERSION}",
            fastbcd=__version__,
            settings=settings,
            data=_data_facts(data),
            test=None if test is None else _data_facts(test),
            net=_net_facts(net),
        )

    @property
    def kind(self) -> str:
        """One of TITLES."""
        return self.format.removeprefix("fastbcd.").partition(" ")[0]

    def check_same(self, old: Config, folder: Path) -> None:
        """Refuse to continue a run that `old` describes, naming the first difference."""
        then = msgspec.to_builtins(old)
        now = json.loads(as_json(self))
        for name, before, after in differences(then, now):
            if not name.startswith(NOT_COMPARED):
                raise ValueError(
                    f"{folder} holds another run: {name.removeprefix('settings.')} is {before} "
                    f"there and {after} now; name another run_dir, or repeat the call with the "
                    f"settings of that run"
                )


def read_config(folder: Path) -> Config:
    """The checked contents of a folder's config.json."""
    path = folder / CONFIG
    try:
        config = msgspec.convert(json.loads(path.read_bytes()), Config)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not of a run: {error}") from error
    known = [f"fastbcd.{kind} {VERSION}" for kind in TITLES]
    if config.format not in known:
        raise ValueError(
            f"{path}: format is {config.format!r}; expected one of {', '.join(known)}"
        )
    return config


def as_json(value: Any, indent: int | None = None) -> str:
    """Dataclasses, settings and numbers of NumPy as JSON."""
    builtins = msgspec.to_builtins(
        value, str_keys=True, enc_hook=lambda number: number.item()
    )
    return json.dumps(builtins, indent=indent, ensure_ascii=False)


def _data_facts(data: ImageData) -> DataFacts:
    stats = torch.tensor([*data.mean, *data.std], dtype=torch.float64)
    mark = digest({**data.identity(SAMPLED), "stats": stats})
    return DataFacts(
        name=data.name,
        images=len(data),
        shape=list(data.images.shape[1:]),
        dtype=str(data.images.dtype).removeprefix("torch."),
        classes=data.classes,
        mean=list(data.mean),
        std=list(data.std),
        digest=mark.hex()[:16],
    )


def _net_facts(net: nn.Module) -> NetFacts:
    tensors = sorted(tensors_of(net).items())
    return NetFacts(
        arch=_arch(net),
        sites={site.name: list(site.shape) for site in masks(net).sites},
        tensors={name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in tensors},
    )


def _arch(net: nn.Module) -> dict[str, Any] | None:
    """What `fastbcd.models.build` takes to build the net again, if that is known."""
    inner = getattr(net, "module", net)  # of DataParallel
    arch = getattr(inner, "arch", None)
    if not isinstance(arch, dict) or not (
        arch.get("name") in models.NAMES or "model" in arch
    ):
        return None
    if all(isinstance(value, str | int | float) for value in arch.values()):
        return arch
    return None
