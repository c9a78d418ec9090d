"""Engine: how hypotheses are scored. It changes the speed, never the numbers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fastbcd.runtime.validate import check_whole

ENGINES = ("auto", "sequential", "stacked", "collapsed")


@dataclass(frozen=True)
class Engine:
    """Which engine scores hypotheses, and its limits; `engine=` takes one of these or a name.

    Args:
        name: "auto", "sequential", "stacked" or "collapsed". "auto" takes the cheapest.
        batch_size: images at a time; None: chosen from the cache or the memory.
        memory: bytes that the values of a pass, and a collapsed form, may take; None: half of
            the free memory of a CPU, 70 % of that of a GPU.
        wave: hypotheses that `choose` and `bcd` score together at most.
        tf32: let a GPU round the factors of products to TF32: faster, and engines differ more.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> engine = fastbcd.Engine("stacked", batch_size=10, memory=2**20)
    >>> fastbcd.score(net, torch.tensor([[0, 1]]), data, engine=engine).engine
    'stacked'
    """

    name: str = "auto"
    _: KW_ONLY
    batch_size: int | None = None
    memory: int | None = None
    wave: int = 8
    tf32: bool = False

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ValueError(f"engine={self.name!r}; choose from {', '.join(ENGINES)}")
        for option in ("batch_size", "memory", "wave"):
            value = getattr(self, option)
            if value is not None or option == "wave":
                check_whole(option, value, 1)
        if not isinstance(self.tf32, bool):
            raise TypeError(f"tf32={self.tf32!r}; it must be True or False")


def as_engine(engine: str | Engine) -> Engine:
    """The settings of an engine that is given by its name.

    >>> as_engine("stacked").name
    'stacked'
    """
    if not isinstance(engine, str | Engine):
        raise TypeError(
            f"engine={engine!r}; pass a name ({', '.join(ENGINES)}) or a fastbcd.Engine"
        )
    return Engine(engine) if isinstance(engine, str) else engine
