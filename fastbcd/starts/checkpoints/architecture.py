"""The network of a foreign checkpoint: recognised by its weights, compared, built and filled."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.masking.masks import mask_modules
from fastbcd.starts.checkpoints.files import (
    CheckpointError,
    ImportReport,
    State,
    check_weights,
    listed,
)

_log = logging.getLogger("fastbcd")

# The other nets of SNL's code, by their blocks in each stage; they are recognised, not built.
OTHER_RESNETS: dict[tuple[int, ...], str] = {
    (1, 1, 1, 1): "resnet9",
    (3, 4, 6, 3): "resnet34",
    (3, 4, 14, 3): "resnet50",
}
# The option that adds one more ReLU: before the first site, or after the last.
EXTRA = {"resnet18": "stem_relu", "wide_resnet22_8": "final_relu"}


class Expected(NamedTuple):
    """What the caller says about the file; None: whatever the file says."""

    arch: str | None
    num_classes: int | None
    image_size: int | None


def import_net(
    report: ImportReport,
    weights: State,
    bits: dict[str, Tensor] | list[Tensor],
    *,
    expected: Expected,
    coef: list[Tensor] | None = None,
) -> nn.Module:
    """The net with these weights and masks, in eval mode, with `import_report`.

    bits: the masks [C,H,W], by site or in execution order. coef: the polynomials [3,C] of
    MaskedPoly sites in execution order. Names and shapes are compared before the net is built.
    """
    path = report.path
    arch = _recognise(weights, path)
    options = [f"{key} {arch[key]}" for key in ("width", "factor", "blocks") if key in arch]
    arch |= {"image_size": _image_size(bits, path), "replacement": "poly" if coef else "identity"}
    _check_expected(expected, arch, path)
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
    check_weights(net, weights, path)
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


def _image_size(bits: dict[str, Tensor] | list[Tensor], path: str) -> int:
    shapes = {tuple(mask.shape) for mask in (bits.values() if isinstance(bits, dict) else bits)}
    if not shapes or any(len(shape) != 3 or 0 in shape for shape in shapes):
        raise CheckpointError(
            f"{path} has masks of shapes {sorted(shapes)[:4]}; expected one of "
            f"[channels, height, width] for each site"
        )
    return max(shape[2] for shape in shapes)  # the first site has the image's size


def _check_expected(expected: Expected, arch: dict[str, Any], path: str) -> None:
    """Refuse a file that is not what the caller says it is."""
    if expected.arch is not None and expected.arch not in models.NAMES:
        raise ValueError(
            f"arch={expected.arch!r}; choose from {', '.join(models.NAMES)}, or leave it out"
        )
    for name, found, hint in (
        ("arch", arch["name"], "pass the one of the file, or leave arch out"),
        ("num_classes", arch["num_classes"], "it was trained on other data"),
        ("image_size", arch["image_size"], "masks belong to one image size"),
    ):
        wanted = getattr(expected, name)
        if wanted is not None and wanted != found:
            raise CheckpointError(f"{path} has {name}={found!r}, expected {wanted!r}; {hint}")


def _masks_by_site(
    bits: dict[str, Tensor] | list[Tensor], net: nn.Module, report: ImportReport
) -> dict[str, Tensor]:
    """The mask of each site of the net, compared by name and shape."""
    path, sites = report.path, mask_modules(net)
    if isinstance(bits, list):
        if len(bits) != len(sites):
            raise CheckpointError(
                f"{path} has {len(bits)} masks, but {report.arch} has {len(sites)} sites of ReLUs: "
                f"masks are {'missing' if len(bits) < len(sites) else 'left over'}"
            )
        bits = dict(zip(sites, bits, strict=True))
    for what, names in (("misses", sites.keys() - bits), ("has extra", bits.keys() - sites)):
        if names:
            raise CheckpointError(
                f"{path} {what} masks of {report.arch}: {listed(sorted(names), 4)}"
            )
    for site, module in sites.items():
        if bits[site].shape != module.mask.shape:
            raise CheckpointError(
                f"{path}: the mask of {site} has shape {tuple(bits[site].shape)}, expected "
                f"{tuple(module.mask.shape)}"
            )
    return {site: bits[site] for site in sites}


# ------------------------------------------------------------------------------- recognising


def _recognise(weights: State, path: str) -> dict[str, Any]:
    """The arguments of `models.build` except the image size, inferred from names and shapes."""
    wide, plain = _blocks(weights, r"block(\d)\.layer"), _blocks(weights, r"layer(\d)")
    if not (wide or plain) or "conv1.weight" not in weights:
        raise _unknown(path, f"unknown: its first weights are {listed(list(weights), 4)}")
    stem, in_channels = _shape(weights, "conv1.weight", 4, path)[:2]
    if wide:
        num_classes = _shape(weights, "fc.weight", 2, path)[0]
        factor, odd = divmod(_shape(weights, "block1.layer.0.conv1.weight", 4, path)[0], 16)
        if wide != (3, 3, 3) or odd or stem != 16:
            depth = 6 * max(wide) + 4
            raise _unknown(path, f"a Wide-ResNet-{depth}-{factor} of blocks {wide}")
        options = {"name": "wide_resnet22_8", "factor": factor}
    else:
        if "linear.weight" not in weights or any(".conv3.weight" in name for name in weights):
            raise _unknown(
                path, f"torchvision's ResNet, or one with bottlenecks, of blocks {plain}"
            )
        num_classes = _shape(weights, "linear.weight", 2, path)[0]
        stages = [f"layer{i + 1}.0.conv1.weight" for i in range(len(plain))]
        widths = [_shape(weights, name, 4, path)[0] for name in stages]
        if plain == (2, 2, 2, 2) and widths == [stem * 2**i for i in range(4)]:
            options = {"name": "resnet18", "width": stem}
        elif len(set(plain)) == 1 and widths == [stem * 2**i for i in range(3)]:
            options = {"name": "resnet20", "width": stem, "blocks": plain[0]}
        else:
            named = OTHER_RESNETS.get(plain, "a ResNet")
            raise _unknown(path, f"{named} of blocks {plain}, channels {widths}")
    return {**options, "num_classes": num_classes, "in_channels": in_channels}


def _blocks(weights: State, stage: str) -> tuple[int, ...]:
    """How many blocks each stage has; the pattern captures the stage's number."""
    found: dict[int, set[str]] = {}
    for name in weights:
        match = re.match(stage + r"\.(\d+)\.conv1\.weight$", name)
        if match:
            found.setdefault(int(match[1]), set()).add(match[2])
    return tuple(len(found[number]) for number in sorted(found))


def _shape(weights: State, name: str, dimensions: int, path: str) -> tuple[int, ...]:
    shape = tuple(weights[name].shape) if name in weights else ()
    if len(shape) != dimensions or 0 in shape:
        found = f"has shape {shape}" if name in weights else "is missing"
        raise CheckpointError(f"{path}: {name} {found}; expected {dimensions} dimensions")
    return shape


def _unknown(path: str, looks: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a checkpoint of another network than {', '.join(models.NAMES)}; it looks like "
        f"{looks}. Build that network yourself, load its weights, fastbcd.convert it, and set the "
        f"masks with fastbcd.set_masks"
    )
