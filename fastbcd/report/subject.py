"""The names of a run's net, data set and metric, which decide the published curves beside it."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

from fastbcd import models
from fastbcd.data.sources import KNOWN
from fastbcd.report import published
from fastbcd.runs.stages import Stages

TITLES = {"resnet18": "ResNet18", "resnet20": "ResNet-20", "wide_resnet22_8": "Wide-ResNet-22-8",
          "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny ImageNet",
          "fashion-mnist-mini": "Fashion-MNIST, small"}  # fmt: skip
SIZES = ("name", "num_classes", "image_size", "in_channels", "replacement")


class Subject(NamedTuple):
    """Net and data set, None: the run did not record it; metric, None: accuracy."""

    arch: str | None
    data: str | None
    metric: str | None = None

    def __str__(self) -> str:
        judge = f", judged by {self.metric}" if self.metric else ""
        return f"{title_of(self.arch, 'a net')} on {title_of(self.data, 'images')}{judge}"

    def curves(self, metric: str) -> list[published.Curve]:
        """The published curves for this net and data set; they are of accuracy."""
        return [] if self.metric else published.curves(self.arch or "", self.data or "", metric)


def subject(run: Stages, arch: str | None = None, data: str | None = None) -> Subject:
    """The names given, or those that the run recorded."""
    for name, value, known in (("arch", arch, models.NAMES), ("data", data, KNOWN)):
        if value is not None and value not in known:
            raise ValueError(f"{name}={value!r}; choose from {', '.join(known)}")
    config, metric = run.last.config, run.bcd.settings.get("metric") if run.bcd else None
    net = arch or _net_name(config["net"]["arch"] or {})
    return Subject(net, data or config["data"]["name"], metric and setting_text(metric))


def _net_name(arch: dict[str, Any]) -> str | None:
    """The recorded name, with the options that are not the published net's.

    >>> _net_name(fastbcd.models.resnet20(width=4).arch), _net_name({"model": "nets:small"})
    ('resnet20 (width 4)', 'nets:small')
    """
    name = arch.get("name")
    if name not in models.NAMES:
        return arch.get("model")
    usual = inspect.signature(getattr(models, name)).parameters
    options = {k: v for k, v in arch.items() if k in usual and k not in SIZES}
    changed = [f"{k} {v}" for k, v in options.items() if v != usual[k].default]
    return f"{name} ({', '.join(changed)})" if changed else name


def title_of(name: str | None, otherwise: str = "not recorded") -> str:
    """The usual spelling of a net's or data set's name.

    >>> title_of("wide_resnet22_8"), title_of("mine"), title_of(None)
    ('Wide-ResNet-22-8', 'mine', 'not recorded')
    """
    return TITLES.get(name, name) if name else otherwise


def setting_text(value: Any) -> str:
    """A setting of config.json: what an object describes itself as, or the name of a function.

    >>> setting_text({"schedule": "Fraction", "share": 0.08, "least": 1})
    'Fraction (share 0.08, least 1)'
    >>> setting_text("function my_code.overlap")
    'overlap'
    """
    if not isinstance(value, dict) or not value:
        return re.sub(r"^function .*\.", "", str(value))
    (_, name), *rest = value.items()
    return f"{name} ({', '.join(f'{k} {v}' for k, v in rest)})"
