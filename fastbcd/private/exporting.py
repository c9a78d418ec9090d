"""export: a net's gather form as a file, read again and compared."""

from __future__ import annotations

import copy
import importlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastbcd.masking.activations import MaskedActivation
from fastbcd.private.artefact import artefact_of
from fastbcd.private.gathering import gather_form
from fastbcd.runtime.atomic_files import write_atomically

PACKAGES = {
    ".pt2": (),
    ".pi": (),
    ".onnx": ("onnx", "onnxscript"),
}  # by the end of a file's name
# Of exported logits, by dtype: another program may sum a convolution in another order.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def export(
    net: nn.Module, example: Tensor, path: str | os.PathLike[str]
) -> float | None:
    """Write the net's gather form, in eval mode, to path; the file takes any batch size.

    net: with masks, or already in gather form; it is not changed. example: a batch of two or more
    images. path: ends in .pi, for `fastbcd private serve` and engines without torch; in .pt2, for
    torch.export.load(path).module(); or in .onnx, which needs the packages onnx and onnxscript: pip
    install fastbcd[onnx].

    Returns the largest difference between the logits of the file and of the net on the example,
    relative to the largest logit; None if the file was not compared (.onnx without onnxruntime).
    A file at path stays as it is unless the new one is right.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(net, torch.randn(2, 4), f"{folder}/net.pt2") < 1e-6
    True
    """
    path = Path(path)
    _check(path, example)
    if path.suffix == ".pi":
        artefact = artefact_of(net, example)
        write_atomically(path, artefact.written())
        return artefact.about["checked"]["difference"]
    masked = any(isinstance(module, MaskedActivation) for module in net.modules())
    model = gather_form(net) if masked else copy.deepcopy(net)
    model.eval()
    with torch.no_grad():
        outputs = _numbers(model(example))
        if not all(bool(output.isfinite().all()) for output in outputs):
            raise ValueError(
                "the net's own logits on the example are not finite, so the file could not be "
                "checked: give images like those of its data, and see fastbcd.private.ranges"
            )
        written = _written(_program(model, example), path.suffix)
        again = _run(written, path.suffix, example)
    differences = list(map(_difference, again or (), outputs))
    for difference in differences:
        if not difference <= TOLERANCES[example.dtype]:  # NaN, too
            raise RuntimeError(
                f"{path} was not written: it would give other logits than the net, by "
                f"{difference:.2g} of the largest; please report this with the net"
            )
    write_atomically(path, written)
    return max(differences, default=None)


def _check(path: Path, example: Tensor) -> None:
    """Refuse what cannot be written, before any work is done."""
    if path.suffix not in PACKAGES:
        raise ValueError(f"{path} must end in {' or '.join(PACKAGES)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {path.parent} to write {path.name} into"
        )
    if len(example) < 2 and path.suffix != ".pi":
        why = "torch.export treats a batch of one as a constant"
        raise ValueError(
            f"example has a batch of {len(example)}; give two or more images: {why}"
        )
    kinds = list(TOLERANCES)
    if path.suffix == ".pi":
        kinds = [torch.float32]
    if path.suffix == ".onnx":
        kinds = [torch.float32, torch.float16]  # what onnxruntime has convolutions of
    if example.dtype not in kinds:
        raise ValueError(
            f"example is {example.dtype}; a {path.suffix} file can be checked for "
            f"{' and '.join(map(str, kinds))}: give net.float() and example.float(), or .pt2"
        )
    for package in PACKAGES[path.suffix]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            way = f"the package {package}: pip install fastbcd[onnx]; .pt2 does not need it"
            raise ImportError(f"writing {path.suffix} needs {way}") from error


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch")}
    try:
        return torch.export.export(model, (example,), dynamic_shapes=(batch,))
    except (
        Exception
    ) as error:  # whatever the net's own forward, or torch.export, raises
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch.export cannot take {type(model).__name__} ({first}): its forward must not "
            f"branch on the values of tensors; fastbcd.convert it, or rewrite that branch"
        ) from error


def _written(program: torch.export.ExportedProgram, suffix: str) -> bytes:
    """The file."""
    if suffix == ".pt2":
        file = io.BytesIO()
        torch.export.save(program, file)
        return file.getvalue()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch deprecates parts of itself
        onnx: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    return onnx.model_proto.SerializeToString()


def _run(written: bytes, suffix: str, example: Tensor) -> list[Tensor] | None:
    """What the file computes; None without onnxruntime."""
    if suffix == ".pt2":
        return _numbers(torch.export.load(io.BytesIO(written)).module()(example))
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    session = runtime.InferenceSession(written, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    outputs = session.run(None, {name: example.cpu().numpy()})
    return [torch.from_numpy(output).to(example.device) for output in outputs]


def _numbers(outputs: Any) -> list[Tensor]:
    """The tensors of what a net returns: logits, or a dict of them."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _difference(again: Tensor, logits: Tensor) -> float:
    """Relative to the largest logit."""
    largest = logits.abs().max().clamp_min(torch.finfo(logits.dtype).tiny)
    return float((again - logits).abs().max() / largest)
