"""Which network a state_dict belongs to, told from the names and shapes of its weights."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from fastbcd import models
from fastbcd.starts.checkpoints.files import CheckpointError, State, listed

# The other nets of SNL's code, by their blocks in each stage; they are recognised, not built.
OTHER_RESNETS: dict[tuple[int, ...], str] = {
    (1, 1, 1, 1): "resnet9",
    (3, 4, 6, 3): "resnet34",
    (3, 4, 14, 3): "resnet50",
}


class Arch(NamedTuple):
    """A network that fastbcd.models builds, and how it must be built to fit."""

    name: str
    options: dict[str, int]  # width and the like, where they differ from net to net
    num_classes: int
    in_channels: int
    extra: str  # the option that adds one more ReLU: before the first site, or after the last

    def build(self, image_size: int, extra: bool, replacement: str) -> nn.Module:
        """The net with random weights; `extra` adds the stem's or the final ReLU."""
        options: dict[str, Any] = dict(self.options, replacement=replacement)
        if extra and self.extra:
            options[self.extra] = True
        return models.build(self.name, self.num_classes, image_size, self.in_channels, **options)

    def describe(self, extra: bool) -> str:
        """In words, such as "resnet18 (width 64, 100 classes)"."""
        parts = [f"{name} {value}" for name, value in self.options.items()]
        parts += [self.extra] if extra and self.extra else []
        return f"{self.name} ({', '.join([*parts, f'{self.num_classes} classes'])})"


def recognise(weights: State, path: str) -> Arch:
    """The architecture of these weights, or an error that says what they look like."""
    for reader in (_wide_resnet, _resnet):
        arch = reader(weights, path)
        if arch is not None:
            return arch
    raise _unknown(path, f"unknown: its first weights are {listed(list(weights), 4)}")


def _blocks(weights: State, pattern: str) -> tuple[int, ...]:
    """Blocks of each stage: pattern captures the stage's number and the block's."""
    found: dict[int, set[int]] = {}
    for name in weights:
        match = re.match(pattern, name)
        if match:
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return tuple(len(found[stage]) for stage in sorted(found))


def _resnet(weights: State, path: str) -> Arch | None:
    blocks = _blocks(weights, r"layer(\d+)\.(\d+)\.conv1\.weight$")
    if not blocks or "conv1.weight" not in weights:
        return None
    if "linear.weight" not in weights or any(".conv3.weight" in name for name in weights):
        raise _unknown(path, f"torchvision's ResNet, or one with bottlenecks, of blocks {blocks}")
    width, in_channels = weights["conv1.weight"].shape[:2]
    widths = [weights[f"layer{i + 1}.0.conv1.weight"].shape[0] for i in range(len(blocks))]
    num_classes = weights["linear.weight"].shape[0]
    if blocks == (2, 2, 2, 2) and widths == [width, 2 * width, 4 * width, 8 * width]:
        return Arch("resnet18", {"width": width}, num_classes, in_channels, "stem_relu")
    if len(set(blocks)) == 1 and widths == [width, 2 * width, 4 * width]:
        options = {"width": width, "blocks": blocks[0]}
        return Arch("resnet20", options, num_classes, in_channels, "")
    named = OTHER_RESNETS.get(blocks)
    raise _unknown(path, f"{named or 'a ResNet'} of blocks {blocks}, channels {widths}")


def _wide_resnet(weights: State, path: str) -> Arch | None:
    blocks = _blocks(weights, r"block(\d+)\.layer\.(\d+)\.conv1\.weight$")
    if not blocks or "fc.weight" not in weights or "conv1.weight" not in weights:
        return None
    factor, odd = divmod(weights["block1.layer.0.conv1.weight"].shape[0], 16)
    if blocks != (3, 3, 3) or odd or weights["conv1.weight"].shape[0] != 16:
        depth = 6 * max(blocks) + 4
        raise _unknown(path, f"a Wide-ResNet-{depth}-{factor} of blocks {blocks}")
    num_classes, in_channels = weights["fc.weight"].shape[0], weights["conv1.weight"].shape[1]
    return Arch("wide_resnet22_8", {"factor": factor}, num_classes, in_channels, "final_relu")


def _unknown(path: str, looks: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a checkpoint of another network than {', '.join(models.NAMES)}; it looks like "
        f"{looks}. Build that network yourself, load its weights, fastbcd.convert it, and set the "
        f"masks with fastbcd.set_masks"
    )
