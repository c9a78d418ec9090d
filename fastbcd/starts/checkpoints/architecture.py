"""The network of a foreign checkpoint: recognised by its weights, compared, built and filled."""

from __future__ import annotations

import logging
import re
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import mask_modules
from fastbcd.starts.checkpoints import files

Masks = dict[str, Tensor] | list[Tensor]  # [C,H,W], by site or in execution order
_log = logging.getLogger("fastbcd")

# The other nets of SNL's code, by their blocks in each stage; they are recognised, not built.
OTHER: Any = {(1, 1, 1, 1): "resnet9", (3, 4, 6, 3): "resnet34", (3, 4, 14, 3): "resnet50"}
# The option that adds one more ReLU: before the first site, or after the last.
EXTRA = {"resnet18": "stem_relu", "wide_resnet22_8": "final_relu"}


def import_net(
    report: files.ImportReport, weights: files.State, bits: Masks, *, expected: dict[str, Any],
    coef: list[Tensor] | None = None,
) -> nn.Module:  # fmt: skip
    """The net with these weights and masks, in eval mode, with `import_report`.

    coef: the polynomials [3,C] of MaskedPoly sites in execution order. expected: arch, num_classes
    and image_size as the caller states them, or None. Names and shapes are compared before the net
    is built.
    """
    path = report.path
    arch = _recognise(weights, path)
    options = [f"{key} {arch[key]}" for key in ("width", "factor", "blocks") if key in arch]
    arch |= {"image_size": _image_size(bits, path), "replacement": "poly" if coef else "identity"}
    _check_expected(expected, {**arch, "arch": arch["name"]}, path)
    with torch.device("meta"):
        net = models.build(**arch)
        extra = EXTRA.get(arch["name"])
        one_more = "alpha" in bits if isinstance(bits, dict) else len(bits) > len(mask_modules(net))
        if extra and one_more:
            arch[extra] = True
            options.append(extra)
            net = models.build(**arch)
    options.append(f"{arch['num_classes']} classes")
    report.arch = f"{arch['name']} ({', '.join(options)})"
    files.check_weights(net, weights, path)
    masks = _masks_by_site(bits, net, report)
    net = models.build(**arch)
    coefs = {f"{site}.coef": c for site, c in zip(masks, coef or (), strict=False)}
    net.load_state_dict({**weights, **coefs}, strict=False)
    for site, module in mask_modules(net).items():
        module.mask.copy_(masks[site])
    report.total = sum(mask.numel() for mask in masks.values())
    report.kept = sum(int(mask.sum()) for mask in masks.values())
    net.import_report = report  # type: ignore[assignment]
    _log.info("%s", report)
    return net.eval()


def _image_size(bits: Masks, path: str) -> int:
    shapes = {tuple(mask.shape) for mask in (bits.values() if isinstance(bits, dict) else bits)}
    files.require(
        bool(shapes) and all(len(shape) == 3 and 0 not in shape for shape in shapes),
        f"{path} has masks of shapes {sorted(shapes)[:4]}; expected one of [channels, height, "
        f"width] for each site",
    )
    return max(shape[2] for shape in shapes)  # the first site has the image's size


def _check_expected(expected: dict[str, Any], found: dict[str, Any], path: str) -> None:
    """Refuse a file that is not what the caller says it is."""
    if expected["arch"] not in (None, *models.NAMES):
        names = ", ".join(models.NAMES)
        raise ValueError(f"arch={expected['arch']!r}; choose from {names}, or leave it out")
    for name, hint in (
        ("arch", "pass the one of the file, or leave arch out"),
        ("num_classes", "it was trained on other data"),
        ("image_size", "masks belong to one image size"),
    ):
        wrong = f"{path} has {name}={found[name]!r}, expected {expected[name]!r}; {hint}"
        files.require(expected[name] in (None, found[name]), wrong)


def _masks_by_site(bits: Masks, net: nn.Module, report: files.ImportReport) -> dict[str, Tensor]:
    """The mask of each site of the net, compared by name and shape."""
    path, sites = report.path, mask_modules(net)
    if isinstance(bits, list):
        files.require(
            len(bits) == len(sites),
            f"{path} has {len(bits)} masks, but {report.arch} has {len(sites)} sites of ReLUs: "
            f"masks are {'missing' if len(bits) < len(sites) else 'left over'}",
        )
        bits = dict(zip(sites, bits, strict=True))
    for what, names in (("misses", sites.keys() - bits), ("has extra", bits.keys() - sites)):
        wrong = f"{path} {what} masks of {report.arch}: {files.listed(sorted(names), 4)}"
        files.require(not names, wrong)
    for site, module in sites.items():
        found, wanted = tuple(bits[site].shape), tuple(module.mask.shape)
        wrong = f"{path}: the mask of {site} has shape {found}, expected {wanted}"
        files.require(found == wanted, wrong)
    return {site: bits[site] for site in sites}


def _recognise(weights: files.State, path: str) -> dict[str, Any]:
    """The arguments of `models.build` except the image size, inferred from names and shapes."""
    wide, plain = _blocks(weights, r"block(\d)\.layer"), _blocks(weights, r"layer(\d)")
    if not (wide or plain) or "conv1.weight" not in weights:
        _refuse(path, f"unknown: its first weights are {files.listed(list(weights), 4)}")
    stem, in_channels = _shape(weights, "conv1.weight", 4, path)[:2]
    if wide:
        num_classes = _shape(weights, "fc.weight", 2, path)[0]
        factor, odd = divmod(_shape(weights, "block1.layer.0.conv1.weight", 4, path)[0], 16)
        if wide != (3, 3, 3) or odd or stem != 16:
            _refuse(path, f"a Wide-ResNet-{6 * max(wide) + 4}-{factor} of blocks {wide}")
        options = {"name": "wide_resnet22_8", "factor": factor}
    else:
        if "linear.weight" not in weights or any(".conv3.weight" in name for name in weights):
            _refuse(path, f"torchvision's ResNet, or one with bottlenecks, of blocks {plain}")
        num_classes = _shape(weights, "linear.weight", 2, path)[0]
        stages = [f"layer{i + 1}.0.conv1.weight" for i in range(len(plain))]
        widths = [_shape(weights, name, 4, path)[0] for name in stages]
        if plain == (2, 2, 2, 2) and widths == [stem * 2**i for i in range(4)]:
            options = {"name": "resnet18", "width": stem}
        elif len(set(plain)) == 1 and widths == [stem * 2**i for i in range(3)]:
            options = {"name": "resnet20", "width": stem, "blocks": plain[0]}
        else:
            name = OTHER.get(plain, "a ResNet")
            _refuse(path, f"{name} of blocks {plain}, channels {widths}")
    return {**options, "num_classes": num_classes, "in_channels": in_channels}


def _blocks(weights: files.State, stage: str) -> tuple[int, ...]:
    """How many blocks each stage has; the pattern captures the stage's number."""
    matches = [re.match(stage + r"\.\d+\.conv1\.weight$", name) for name in weights]
    stages = [int(match[1]) for match in matches if match]
    return tuple(stages.count(number) for number in sorted(set(stages)))


def _shape(weights: files.State, name: str, dimensions: int, path: str) -> tuple[int, ...]:
    shape = tuple(weights[name].shape) if name in weights else ()
    found = f"has shape {shape}" if name in weights else "is missing"
    fine = len(shape) == dimensions and 0 not in shape
    files.require(fine, f"{path}: {name} {found}; expected {dimensions} dimensions")
    return shape


def _refuse(path: str, looks: str) -> NoReturn:
    raise files.CheckpointError(
        f"{path} is a checkpoint of another network than {', '.join(models.NAMES)}; it looks like "
        f"{looks}. Build that network yourself, load its weights, fastbcd.convert it, and set the "
        f"masks with fastbcd.set_masks"
    )
