"""gather_form: the same net, with each site evaluating only the ReLUs that it keeps; and export.

`where(mask, relu(x), x)` evaluates every ReLU, and private inference pays for every one. Here the
kept units are gathered, activated and written back:

    f = x.flatten(1)
    f[:, kept] = relu(f[:, kept])
    f[:, removed] = c2*f² + c1*f + c0       # where removed ReLUs are lines (c2 = 0) or quadratics

Nothing is left of a site that keeps no ReLU, unless its ReLUs became lines or quadratics.
"""

from __future__ import annotations

import copy
import importlib
import operator
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastbcd.graph.trace import Tracer, erase_calls, without_inplace
from fastbcd.kernels.geometry import compute_dtype
from fastbcd.masking.activations import MaskedActivation, MaskedLine, MaskedPoly, MaskedReLU
from fastbcd.masking.masks import mask_modules
from fastbcd.runtime.atomic_files import write_atomically

TOLERANCE = 1e-4  # of exported logits: another program may sum a convolution in another order


class GatheredReLU(nn.Module):
    """ReLU at the positions `kept` [n] of a flattened sample, the identity elsewhere."""

    kept: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", mask.flatten().nonzero().flatten())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        relus = torch.relu(flat.index_select(1, self.kept))
        return flat.index_copy(1, self.kept, relus).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{len(self.kept):,} ReLUs"


class GatheredPoly(GatheredReLU):
    """ReLU at `kept`, c2*z² + c1*z + c0 at `removed`, coef [2 or 3, C] by the unit's `channel`."""

    removed: Tensor
    channel: Tensor

    def __init__(self, mask: Tensor, coef: nn.Parameter) -> None:
        super().__init__(mask)
        self.coef = coef
        self.register_buffer("removed", mask.logical_not().flatten().nonzero().flatten())
        self.register_buffer("channel", self.removed // mask[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        flat, small = x.flatten(1), compute_dtype(x.dtype)
        z = flat.index_select(1, self.removed).to(small)
        values = polynomial(z, self.coef.to(small).index_select(1, self.channel))
        y = flat.index_copy(1, self.removed, values.to(x.dtype))
        return super().forward(y).reshape(x.shape)

    def extra_repr(self) -> str:
        others = "lines" if len(self.coef) == 2 else "quadratics"
        return f"{len(self.kept):,} ReLUs, {len(self.removed):,} {others}"


class Polynomial(nn.Module):
    """c2*z² + c1*z + c0 at every position, coef [2 or 3, C] by channel."""

    def __init__(self, coef: nn.Parameter) -> None:
        super().__init__()
        self.coef = coef

    def forward(self, x: Tensor) -> Tensor:
        small = compute_dtype(x.dtype)
        coef = self.coef.to(small).view(len(self.coef), -1, *(1,) * (x.ndim - 2))
        return polynomial(x.to(small), coef).to(x.dtype)


def polynomial(z: Tensor, coef: Tensor) -> Tensor:
    """The line or quadratic of z, coef [2 or 3, ...]; (c2*z + c1)*z + c0, as in reference.py."""
    y = coef[-1]
    for c in coef.flip(0)[1:]:
        y = y * z + c
    return y


class Copied(nn.Module):
    """A copy: a dropped site would share memory that the net overwrites."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def gather_form(net: nn.Module) -> nn.Module:
    """A copy of the net in which each site evaluates only the ReLUs it keeps.

    The logits are bit-identical. A site that keeps all ReLUs becomes nn.ReLU. One that keeps none
    becomes its line or quadratic, or else is dropped: no call is left in the graph of a converted
    net, and nn.Identity in other nets, of which `export` leaves nothing. Only a net that overwrites
    memory which a dropped site would share, or that torch.fx cannot trace, has copies in their
    place.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU(3), nn.Linear(3, 2))
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([1]))
    >>> small, x = gather_form(net), torch.randn(5, 4)
    >>> small[1], torch.equal(small(x), net(x))
    (GatheredReLU(2 ReLUs), True)
    """
    for name, module in mask_modules(net).items():
        if type(module) not in (MaskedReLU, MaskedLine, MaskedPoly):
            what = f"site {name!r} is a {type(module).__name__} of an unfinished start"
            raise ValueError(f"{what}: finish it first")
    twin = copy.deepcopy(net)
    if isinstance(twin, MaskedActivation):
        return _gathered(twin)
    made = {act: _gathered(act) for act in mask_modules(twin).values()}
    dropped: Any = {act: new for act, new in made.items() if type(new) is nn.Identity}
    _replace(twin, dropped)
    try:
        if dropped:
            graph = twin.graph if isinstance(twin, fx.GraphModule) else _Tracer().trace(twin)
            without_inplace(twin, graph)  # refuses to overwrite what is read later
        for part in twin.modules():
            if dropped and isinstance(part, fx.GraphModule):
                erase_calls(part, part.graph, set(dropped.values()))
                part.recompile()
    except Exception:  # whatever the net's own forward raises on fx proxies
        _replace(twin, {new: Copied() for new in dropped.values()})
    _replace(twin, made)
    return twin


class _Proxy(fx.Proxy):
    """x += y overwrites x; torch.fx alone takes it for x = x + y."""


def _recorded(function: Any) -> Any:
    return lambda x, y: x.tracer.create_proxy("call_function", function, (x, y), {})


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(_Proxy, f"__{_name}__", _recorded(getattr(operator, _name)))


class _Tracer(Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _replace(net: nn.Module, made: dict[Any, nn.Module]) -> None:
    """Put modules in the place of others, which may have several names."""
    for name, module in list(net.named_modules(remove_duplicate=False)):
        if module in made:
            owner, _, leaf = name.rpartition(".")
            new = made[module].train(module.training)
            net.get_submodule(owner).register_module(leaf, new)


def _gathered(act: MaskedActivation) -> nn.Module:
    mask = act.mask.bool()
    if mask.all():
        return nn.ReLU()
    if isinstance(act, MaskedLine | MaskedPoly):
        return GatheredPoly(mask, act.coef) if mask.any() else Polynomial(act.coef)
    return GatheredReLU(mask) if mask.any() else nn.Identity()


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
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} must end in {' or '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    if len(example) < 2:
        why = "torch.export treats a batch of one as a constant"
        raise ValueError(f"example has a batch of {len(example)}; give two or more images: {why}")
    needed, write, run = _FORMATS[path.suffix]
    for package in needed:
        try:
            importlib.import_module(package)
        except ImportError as error:
            way = f"the package {package}: pip install fastbcd[onnx]; .pt2 does not need it"
            raise ImportError(f"writing {path.suffix} needs {way}") from error
    masked = any(isinstance(module, MaskedActivation) for module in net.modules())
    model = (gather_form(net) if masked else copy.deepcopy(net)).eval()
    with torch.no_grad():
        logits = model(example)
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "the net's own logits on the example are not finite, so the file could not be "
                "checked: give images like those of its data, and see activation_ranges"
            )
        try:
            batch = {0: torch.export.Dim("batch")}
            program = torch.export.export(model, (example,), dynamic_shapes=(batch,))
        except Exception as error:  # whatever the net's own forward, or torch.export, raises
            first = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"torch.export cannot take {type(model).__name__} ({first}): its forward must not "
                f"branch on the values of tensors; fastbcd.convert it, or rewrite that branch"
            ) from error
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
