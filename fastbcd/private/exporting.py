"""export: a net's gather form as a file, read again and compared."""

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

NEEDS = {".pt2": (), ".onnx": ("onnx", "onnxscript")}  # packages by the end of a file's name
TOLERANCE = 1e-4  # of exported logits: another program may sum a convolution in another order


def export(net: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> float | None:
    """Write the net's gather form, in eval mode, to path; the file takes any batch size.

    net: with masks, or already in gather form; it is not changed. example: a batch of two or more
    images. path: ends in .pt2, for torch.export.load(path).module(), or .onnx, which needs the
    packages onnx and onnxscript: pip install fastbcd[onnx].

    Returns the largest difference between the logits of the file and of the net on the example,
    relative to the largest logit; None if the file was not compared (.onnx without onnxruntime).

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(net, torch.randn(2, 4), f"{folder}/net.pt2") < 1e-6
    True
    """
    path = Path(path)
    _check(path, example)
    masked = any(isinstance(module, MaskedActivation) for module in net.modules())
    model = gather_form(net) if masked else copy.deepcopy(net)
    model.eval()
    with torch.no_grad():
        logits = model(example)
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "the net's own logits on the example are not finite, so the file could not be "
                "checked: give images like those of its data, and see activation_ranges"
            )
        program = _program(model, example)
        write_atomically(path, lambda file: _write(program, file, path.suffix))
        again = _run(path, example)
    if again is None:
        return None
    largest = logits.abs().max().clamp_min(1e-30)
    difference = float((again - logits).abs().max() / largest)
    if not difference <= TOLERANCE:  # NaN, too
        path.unlink()
        raise RuntimeError(
            f"{path} gave other logits than the net, by {difference:.2g} of the largest, and was "
            f"deleted; please report this with the net"
        )
    return difference


def _check(path: Path, example: Tensor) -> None:
    """Refuse what cannot be written, before any work is done."""
    if path.suffix not in NEEDS:
        raise ValueError(f"{path} must end in {' or '.join(NEEDS)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    if len(example) < 2:
        why = "torch.export treats a batch of one as a constant"
        raise ValueError(f"example has a batch of {len(example)}; give two or more images: {why}")
    for package in NEEDS[path.suffix]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            way = f"the package {package}: pip install fastbcd[onnx]; .pt2 does not need it"
            raise ImportError(f"writing {path.suffix} needs {way}") from error


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch")}
    try:
        return torch.export.export(model, (example,), dynamic_shapes=(batch,))
    except Exception as error:  # whatever the net's own forward, or torch.export, raises
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch.export cannot take {type(model).__name__} ({first}): its forward must not "
            f"branch on the values of tensors; fastbcd.convert it, or rewrite that branch"
        ) from error


def _write(program: torch.export.ExportedProgram, file: Any, suffix: str) -> None:
    if suffix == ".pt2":
        torch.export.save(program, file)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates parts of itself
        onnx: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    file.write(onnx.model_proto.SerializeToString())


def _run(path: Path, example: Tensor) -> Tensor | None:
    """The logits of the file; None without onnxruntime."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(example)
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    (logits,) = session.run(None, {name: example.cpu().numpy()})
    return torch.from_numpy(logits).to(example.device)
