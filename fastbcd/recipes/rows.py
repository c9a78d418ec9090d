"""The paper's experiments as rows: budgets in thousands of ReLUs, test accuracies in percent.

Sources in the paper: accuracies in Tables 2 and 3 (their captions are swapped:
Table 2 holds ResNet18) and Figure 4, B_ref in Tables 4 and 5, the other settings in the text for
ResNet18, in Table 6 for Wide-ResNet-22-8 and below it for AutoReP, ablations in Figure 5.
"""

from __future__ import annotations

from typing import Any

# drc, adt, rt, epochs, optimizer, lr
_RESNET: dict[str, Any] = {
    "drc": 100, "adt": 0.3, "rt": 50, "epochs": 20, "optimizer": "sgd", "lr": 1e-3,
}  # fmt: skip
_RESNET_TINY = {**_RESNET, "epochs": 5}
_ADAM = {**_RESNET, "adt": 0.1, "optimizer": "adam", "lr": 3.5e-5}
_WRN_TINY = {**_ADAM, "drc": 300, "epochs": 5}

# source, arch, data, start, settings, rows of (budget, B_ref, published start, published BCD)
EXPERIMENTS: list[tuple[str, str, str, str, dict[str, Any], list[tuple[float, ...]]]] = [
    ("Table 2", "resnet18", "cifar10", "snl", _RESNET, [
        (6, 30, 84.39, 85.65), (9, 30, 86.97, 87.49), (15, 30, 88.43, 89.65),
        (20, 30, 90.76, 90.78), (100, 200, 93.50, 93.78), (150, 200, 94.26, 94.94),
    ]),
    ("Table 2", "resnet18", "cifar100", "snl", _RESNET, [
        (6, 30, 57.65, 61.78), (9, 30, 62.80, 64.80), (15, 30, 67.17, 68.85),
        (20, 30, 69.38, 69.70), (100, 200, 75.42, 76.50), (150, 200, 76.13, 77.27),
    ]),
    ("Table 2", "resnet18", "tiny-imagenet", "snl", _RESNET_TINY, [
        (59.1, 80, 54.24, 56.60), (99.6, 150, 58.94, 59.77), (150, 180, 62.12, 62.98),
        (200, 220, 63.39, 63.97),
    ]),
    ("Table 3", "wide_resnet22_8", "cifar10", "snl", _ADAM, [
        (50, 75, 92.85, 93.21), (240, 400, 94.24, 95.29), (300, 400, 95.06, 95.37),
    ]),
    ("Table 3", "wide_resnet22_8", "cifar100", "snl", _ADAM, [
        (50, 75, 72.10, 72.60), (120, 200, 76.35, 76.38), (150, 200, 77.35, 77.39),
        (180, 200, 77.65, 78.08),
    ]),
    ("Table 3", "wide_resnet22_8", "tiny-imagenet", "snl", _WRN_TINY, [
        (200, 300, 58.40, 60.50), (250, 300, 60.36, 61.27), (488.8, 570, 64.42, 65.04),
    ]),
    ("Figure 4", "resnet18", "cifar100", "autorep", _ADAM, [
        (6, 30, 71.63, 72.94), (9, 30, 72.39, 73.01), (15, 30, 72.93, 73.70),
        (20, 30, 72.80, 73.80),
    ]),
    ("Figure 4", "wide_resnet22_8", "cifar100", "autorep", _ADAM, [
        (25, 75, 74.22, 77.18), (50, 75, 75.56, 76.40), (100, 200, 76.19, 77.10),
    ]),
]  # fmt: skip

NOTES = {
    (
        "wide_resnet22_8",
        "autorep",
    ): "the paper states no B_ref for AutoReP on this net; this is the one of its SNL runs",
    ("resnet18", "autorep"): "B_ref is that of the paper's table for all ResNet18 experiments",
}

# ResNet18 on CIFAR-100 from SNL at 30K to 15K: the changed setting and the accuracy.
ABLATIONS: list[tuple[str, dict[str, Any], float]] = [
    ("ablation-base", {}, 68.89),
    ("ablation-drc-200", {"drc": 200}, 66.93),
    ("ablation-drc-300", {"drc": 300}, 64.89),
    ("ablation-drc-500", {"drc": 500}, 62.68),
    ("ablation-adt-0.1", {"adt": 0.1}, 68.61),
    ("ablation-adt-0.2", {"adt": 0.2}, 68.67),
    ("ablation-adt-0.5", {"adt": 0.5}, 68.66),
    ("ablation-epochs-5", {"epochs": 5}, 63.63),
    ("ablation-epochs-10", {"epochs": 10}, 66.23),
    ("ablation-epochs-30", {"epochs": 30}, 68.29),
]
