"""The network of a foreign checkpoint: recognised by its weights, compared, built and filled."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import mask_modules, masks
from fastbcd.starts.checkpoints import files

# The option of a network that adds one more ReLU: before the first site, or after the last.
ONE_MORE = {"resnet18": "stem_relu", "wide_resnet22_8": "final_relu"}
_log = logging.getLogger("fastbcd")


@dataclass
class ImportReport:
    """What an importer read from a file, and what it left out."""

    path: str
    format: str  # "SNL", "AutoReP", "ReLUPruner"
    arch: str = ""
    kept: int = 0
    total: int = 0
    ignored: list[str] = field(
        default_factory=list
    )  # entries that the net does not use
    notes: list[str] = field(default_factory=list)  # what a user should know

    def __str__(self) -> str:
        title = f"{self.path}: {self.format} checkpoint of {self.arch}"
        lines = [f"{title}, {self.kept:,} of {self.total:,} ReLUs kept"]
        lines += [f"  note: {note}" for note in self.notes]
        if self.ignored:
            lines.append(f"  ignored: {files.listed(self.ignored, 12)}")
        return "\n".join(lines)


class SiteTensors(NamedTuple):
    """The mask of a site, bool [C, H, W], and its polynomial [3, C] if it has one."""

    bits: Tensor
    coef: Tensor | None = None


def build_net(
    report: ImportReport,
    weights: files.State,
    sites: dict[str, SiteTensors],
    expected: dict[str, Any],
) -> nn.Module:
    """The net with these weights and sites, in eval mode, with `import_report`.

    sites: by name, or by number in execution order. expected: arch, num_classes and image_size as
    the caller states them, or None. Names and shapes are compared before the net is built.
    """
    path = report.path
    try:
        arch = recognise(weights, path)
        arch["image_size"] = max(site.bits.shape[2] for site in sites.values())
        arch["replacement"] = "identity"
        if any(site.coef is not None for site in sites.values()):
            arch["replacement"] = "poly"
        for key, value in expected.items():
            actual = arch[key.replace("arch", "name")]
            if value not in (None, actual):
                raise ValueError(f"{path} has {key}={actual!r}, expected {value!r}")
        blank = _blank(arch)
        if len(sites) == len(mask_modules(blank)) + 1 and arch["name"] in ONE_MORE:
            arch[ONE_MORE[arch["name"]]] = True
            blank = _blank(arch)
        report.arch = _title(arch)
        state = weights | _site_state(sites, list(mask_modules(blank)))
        files.check_state(blank.state_dict(), state, path, report.arch)
    except files.CheckpointError as error:
        raise files.CheckpointError(
            f"{error}. If the file is of another network than {', '.join(models.NAMES)}: build "
            f"that network yourself, load its weights, fastbcd.convert it, and set the masks with "
            f"fastbcd.set_masks"
        ) from error
    net = models.build(**arch)
    net.load_state_dict(state, strict=False)
    kept = masks(net)
    report.kept = kept.count()
    report.total = kept.total
    net.import_report = report  # type: ignore[assignment]
    _log.info("%s", report)
    return net.eval()


def recognise(weights: files.State, path: str) -> dict[str, Any]:
    """The arguments of `models.build` for the network that these weights are nearest to."""
    stem = _shape(weights, "conv1.weight", 4, path)
    arch: dict[str, Any] = {"in_channels": stem[1]}
    if "block1.layer.0.conv1.weight" in weights:
        channels = _shape(weights, "block1.layer.0.conv1.weight", 4, path)[0]
        arch |= {"name": "wide_resnet22_8", "factor": max(1, channels // 16)}
        head = "fc.weight"
    else:
        arch |= {"name": "resnet18", "width": stem[0]}
        if "layer4.0.conv1.weight" not in weights:
            blocks = [
                name
                for name in weights
                if re.match(r"layer1\.\d+\.conv1\.weight$", name)
            ]
            arch |= {"name": "resnet20", "blocks": max(1, len(blocks))}
        head = "linear.weight"
    arch["num_classes"] = _shape(weights, head, 2, path)[0]
    return arch


def _shape(
    weights: files.State, name: str, dimensions: int, path: str
) -> tuple[int, ...]:
    names = files.listed(weights, files.SHOWN)
    files.require(name in weights, f"{path}: {name} is missing: it holds {names}")
    shape = tuple(weights[name].shape)
    files.require(
        len(shape) == dimensions and 0 not in shape,
        f"{path}: {name} has shape {shape}; expected {dimensions} dimensions",
    )
    return shape


def _blank(arch: dict[str, Any]) -> nn.Module:
    """The network without memory, to compare names and shapes with."""
    with torch.device("meta"):
        return models.build(**arch)


def _title(arch: dict[str, Any]) -> str:
    """A network in words: resnet18 (width 4, 5 classes)."""
    options = [
        f"{key} {arch[key]}" for key in ("width", "factor", "blocks") if key in arch
    ]
    options += [option for option in ONE_MORE.values() if option in arch]
    return f"{arch['name']} ({', '.join(options)}, {arch['num_classes']} classes)"


def _site_state(sites: dict[str, SiteTensors], names: list[str]) -> files.State:
    """The entries of a state_dict that the sites are; names: of the net's sites in order."""
    state = {}
    for key, site in sites.items():
        name = key
        if key.isdecimal() and int(key) < len(names):
            name = names[int(key)]
        state[f"{name}.mask"] = site.bits
        if site.coef is not None:
            state[f"{name}.coef"] = site.coef
    return state
