"""The network of a foreign checkpoint: recognised by its weights, compared, built and filled."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import mask_modules
from fastbcd.starts.checkpoints import files

# The option of a network that adds one more ReLU: before the first site, or after the last.
ONE_MORE = {"resnet18": "stem_relu", "wide_resnet22_8": "final_relu"}


class SiteTensors(NamedTuple):
    """The mask of a site, bool [C, H, W], and its polynomial [3, C] if it has one."""

    bits: Tensor
    coef: Tensor | None = None


def build_net(
    weights: files.State,
    sites: dict[str, SiteTensors],
    expected: dict[str, Any],
    path: str,
) -> nn.Module:
    """The net with these weights and sites, in eval mode.

    sites: by name, or by number in execution order. expected: arch, num_classes and image_size as
    the caller states them, or None. Names and shapes are compared before the net is built.
    """
    try:
        arch = recognise(weights, path)
        arch["image_size"] = max(site.bits.shape[2] for site in sites.values())
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
        state = weights | _site_state(sites, list(mask_modules(blank)))
        files.check_state(blank.state_dict(), state, path, title(blank))
    except files.CheckpointError as error:
        raise files.CheckpointError(
            f"{error}. If the file is of another network than {', '.join(models.NAMES)}: build "
            f"that network yourself, load its weights, fastbcd.convert it, and set the masks with "
            f"fastbcd.set_masks"
        ) from error
    net = models.build(**arch)
    net.load_state_dict(state, strict=False)
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
            names = "\n".join(weights)
            blocks = len(re.findall(r"^layer1\.\d+\.conv1\.weight$", names, re.M))
            arch |= {"name": "resnet20", "blocks": max(1, blocks)}
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


def title(net: Any) -> str:
    """A network of fastbcd.models in words.

    >>> title(models.resnet18(5, width=4, stem_relu=True))
    'resnet18 (width 4, stem_relu, 5 classes)'
    """
    sizes = ("width", "factor", "blocks")
    options = [f"{key} {net.arch[key]}" for key in sizes if key in net.arch]
    options += [key for key, value in net.arch.items() if value is True]
    classes = f"{net.arch['num_classes']} classes"
    return f"{net.arch['name']} ({', '.join([*options, classes])})"


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
