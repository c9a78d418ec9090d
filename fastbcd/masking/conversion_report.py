"""What `convert` masked in a network, and the nonlinear operations that it left."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class NonlinearOp:
    """An operation that `convert` left as it is."""

    name: str  # the module, or the function with the module that calls it
    kind: str  # the operator
    elements: int  # of its result, per image
    # Per image: a window of k values takes k - 1, a ReLU left in place 1.
    comparisons: int = 0

    def __str__(self) -> str:
        text = self.name
        if self.name.rpartition(".")[2] != self.kind:
            text += f" ({self.kind})"
        text += f": {self.elements:,} elements"
        if self.comparisons:
            text += f", {self.comparisons:,} comparisons"
        return f"{text} per image"


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` masked and what it left, as `net.conversion_report`."""

    sites: int
    relus: int  # per image
    nonlinear: tuple[NonlinearOp, ...]  # operations that stay, those of skip= included
    exchanged: tuple[str, ...] = ()  # calls that maxpool=, relu6=, smooth= changed

    @property
    def comparisons(self) -> int:
        """Of the operations that stay, per image: in private inference each costs like a ReLU."""
        return sum(op.comparisons for op in self.nonlinear)

    def __str__(self) -> str:
        stays = f"{len(self.nonlinear)} other nonlinear operations stay as they are"
        head = f"{self.relus:,} ReLUs at {self.sites} sites have masks; {stays}"
        if self.comparisons:
            head += f", with {self.comparisons:,} comparisons"
        if self.exchanged:
            head += f"; {len(self.exchanged)} calls were exchanged: fine-tune the net"
        return "\n  ".join([head, *map(str, self.nonlinear)])


def nonlinear_of(net: nn.Module) -> tuple[NonlinearOp, ...]:
    """The nonlinear operations that `convert` left in a net, or in the parts of a net."""
    reports = (getattr(module, "conversion_report", None) for module in net.modules())
    return tuple(
        op for report in reports if report is not None for op in report.nonlinear
    )


def comparisons_of(net: nn.Module) -> int:
    """The comparisons per image of the operations that `convert` left, such as max-pools.

    Masks do not change them; for images of the size that the net was converted with.

    >>> model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    >>> net = fastbcd.convert(model, torch.zeros(1, 3, 4, 4), skip=nn.MaxPool2d)
    >>> comparisons_of(net)  # 3 in each of 12 windows
    36
    """
    return sum(op.comparisons for op in nonlinear_of(net))
