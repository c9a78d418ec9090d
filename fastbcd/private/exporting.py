"""export: the gather form of a net as a file for other programs.

    .pt2   torch.export; torch.export.load(path).module()(images)
    .onnx  torch.onnx.export; needs the packages onnx and onnxscript: pip install fastbcd[onnx]

Both accept any batch size. The file is read back and its logits on the example are compared with
the net's; for .onnx this needs onnxruntime.
"""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedActivation
from fastbcd.private.gathering import gather_form
from fastbcd.runtime.atomic_files import write_atomically

TOLERANCE = 1e-4  # another program may sum a convolution in another order


def export(net: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> float | None:
    """Write the net's gather form, in eval mode, to path, which ends in .pt2 or .onnx.

    Args:
        net: with masks, or already in gather form; it is not changed.
        example: a batch of two or more images.

    Returns the largest difference between the logits of the file and of the net on the example,
    relative to the largest logit; None if the file was not compared (.onnx without onnxruntime).

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(net, torch.randn(2, 4), f"{folder}/net.pt2") < 1e-6
    True
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} must end in {' or '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    if len(example) < 2:
        raise ValueError(
            f"example has a batch of {len(example)}; give two or more images, since torch.export "
            f"treats a batch of one as a constant"
        )
    needed, write, run = _FORMATS[path.suffix]
    for package in needed:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"writing {path.suffix} needs the package {package}: pip install fastbcd[onnx]; "
                f".pt2 does not need it"
            ) from error
    masked = any(isinstance(module, MaskedActivation) for module in net.modules())
    model = (gather_form(net) if masked else copy.deepcopy(net)).eval()
    with torch.no_grad():
        logits = model(example)
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "the net's own logits on the example are not finite, so the file could not be "
                "checked: give images like those of its data, and see activation_ranges"
            )
        program = _program(model, example)
        write_atomically(path, lambda file: write(program, file))
        found = run(path, example)
    if found is None:
        return None
    difference = float((found - logits).abs().max() / logits.abs().max().clamp_min(1e-30))
    if difference > TOLERANCE or not bool(found.isfinite().all()):
        path.unlink()
        raise RuntimeError(
            f"{path} gave other logits than the net, by {difference:.2g} of the largest, and was "
            f"deleted; please report this with the net"
        )
    return difference


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    try:
        return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # whatever the net's own forward, or torch.export, raises
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch.export cannot take {type(model).__name__} ({first}): its forward must not "
            f"branch on the values of tensors; fastbcd.convert it, or rewrite that branch"
        ) from error


def _write_onnx(program: torch.export.ExportedProgram, file: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates parts of itself
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    file.write(made.model_proto.SerializeToString())


def _run_onnx(path: Path, example: Tensor) -> Tensor | None:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: example.cpu().numpy()}
    return torch.from_numpy(session.run(None, inputs)[0]).to(example.device)


# The packages that a format needs, how it is written, and how the file is run.
_FORMATS: dict[str, Any] = {
    ".pt2": ((), torch.export.save, lambda path, x: torch.export.load(path).module()(x)),
    ".onnx": (("onnx", "onnxscript"), _write_onnx, _run_onnx),
}
