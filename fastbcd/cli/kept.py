"""What `cost` and `export` read: the ReLUs that a run directory or a file of masks keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fastbcd.cli.options import read_weights
from fastbcd.masking.masks import MaskSet
from fastbcd.runs.directory import STATES
from fastbcd.runs.read import masks_of, quadratics


class Kept(NamedTuple):
    """Masks, and the sites whose removed ReLUs are quadratics."""

    masks: MaskSet
    poly: tuple[str, ...]


def find_run(path: Path) -> Path:
    """The run directory at path; of a recipe's, its last stage that has begun."""
    stages = [p for p in sorted(path.glob("[0-9]-*")) if any((p / s).exists() for s in STATES)]
    return stages[-1] if stages else path


def read_kept(path: Path) -> Kept:
    """The masks of a run directory as they stand, or of a file that `MaskSet.save` wrote.

    What a file's removed ReLUs became is not in it: it counts as the identity.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is nothing at {path}; name a run directory or a mask file")
    if path.is_file():
        return Kept(MaskSet.load(path), ())
    run = find_run(path)
    tensors = read_weights(run)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    masks = masks_of(tensors, config)
    if masks is None:
        missing = next(n for n in config["net"]["sites"] if f"{n}.mask" not in tensors)
        raise ValueError(
            f"the run in {run} has no final masks yet (none for site {missing!r}): let it end"
        )
    return Kept(masks, quadratics(tensors, [site.name for site in masks.sites]))
