"""The table of docs/networks.md: what `fastbcd.convert` makes of 28 networks.

python docs/networks.py > docs/networks.md     # after make extras; five minutes on 2 cores

Networks have random weights and see images of 224×224. Where nothing was exchanged, the logits of
the converted network are asserted to be those of the network, bit for bit.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import fastbcd

TORCHVISION = """
    alexnet vgg16_bn resnet18 resnet50 wide_resnet50_2 resnext50_32x4d densenet121
    googlenet inception_v3 squeezenet1_1 shufflenet_v2_x1_0 mnasnet1_0 mobilenet_v2
    mobilenet_v3_small efficientnet_b0 efficientnet_v2_s regnet_x_400mf regnet_y_400mf
    convnext_tiny vit_b_16
"""
TIMM = """
    resnet26 dla34 hrnet_w18_small repvgg_a0 ghostnet_100 selecsls42 resnetv2_50 rexnet_100
"""
FOOT = """
A network without ReLU, ReLU6, SiLU, GELU, Hardswish and Mish is refused with the operations that it
has: timm's cspresnet50 has LeakyReLU alone."""
OPTIONS = {"relu6": "relu", "smooth": "relu"}  # where there is no ReLU to mask without

HEAD = """# Networks

What `fastbcd.convert` makes of networks of torchvision and timm, for images of 224×224. Made by
`python docs/networks.py` with torchvision {torchvision} and timm {timm}.

- **ReLUs** per image, and the sites they lie in: the calls of ReLU.
- **Exchanged**: activations that became ReLUs by `relu6="relu"` or `smooth="relu"`; fine-tune the
  net before its ReLUs are removed (`fastbcd.train`). Where nothing was exchanged, the logits of the
  converted network are those of the network, bit for bit: the script asserts it.
- **Comparisons in pools** per image: each costs like a ReLU in private inference, and
  `maxpool="average"` avoids them.
- **Left**: other nonlinear operations that stay as they are, by the number of calls.

| network | ReLUs | sites | exchanged | comparisons in pools | left |
|---|---|---|---|---|---|"""


def import_torchvision() -> Any:
    """torchvision; PyPI's looks for operators that it does not define beside a CPU torch."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        nms = "Tensor dets, Tensor scores, float iou_threshold"
        qnms = (
            "Tensor dets, Tensor scores, float threshold, float scale, int zero_point"
        )
        torch.library.define("torchvision::nms", f"({nms}) -> Tensor")
        torch.library.define("torchvision::qnms", f"({qnms}) -> Tensor")
        return importlib.import_module("torchvision")


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore")
    torchvision = import_torchvision()
    timm = importlib.import_module("timm")
    print(HEAD.format(torchvision=torchvision.__version__, timm=timm.__version__))
    for name in TORCHVISION.split():
        kwargs = {}
        if name in ("googlenet", "inception_v3"):
            kwargs = {"init_weights": False}
        show(
            f"torchvision {name}",
            torchvision.models.get_model(name, weights=None, **kwargs),
        )
    for name in TIMM.split():
        show(f"timm {name}", timm.create_model(name, pretrained=False))
    print(FOOT)


def show(title: str, model: nn.Module) -> None:
    """Print the row of a model."""
    torch.manual_seed(0)
    print(row(title, model.eval(), torch.randn(1, 3, 224, 224)), flush=True)
    print(title, file=sys.stderr)


def row(title: str, model: nn.Module, image: Tensor) -> str:
    """One row of the table, once the logits are compared."""
    try:
        net = fastbcd.convert(model, image)
    except fastbcd.ConversionError as error:
        if "relu6='relu'" not in str(error) and "smooth='relu'" not in str(error):
            raise
        net = fastbcd.convert(model, image, **OPTIONS)
    report = net.conversion_report
    if not report.exchanged:
        with torch.no_grad():
            assert torch.equal(net(image), model(image)), title
    pools = [op for op in report.nonlinear if "max_pool" in op.kind]
    left = Counter(op.kind for op in report.nonlinear if op not in pools)
    cells = [
        title,
        f"{report.relus:,}",
        f"{report.sites}",
        _kinds(model, report.exchanged),
        f"{sum(op.comparisons for op in pools):,}",
        _counts(left),
    ]
    return f"| {' | '.join(cells)} |"


def _kinds(model: nn.Module, exchanged: tuple[str, ...]) -> str:
    """The types of the activations that were exchanged, with their numbers."""
    kinds: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name in exchanged:
        called = modules.get(name)
        kind = re.sub(r"_\d+$", "", name.rpartition(".")[2])
        if called is not None:
            kind = type(called).__name__
        kinds[kind] += 1
    return _counts(kinds)


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "–"


if __name__ == "__main__":
    main()
