"""Pickles read as data: arrays of whole numbers, numbers, strings and containers, nothing else."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

_CODES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


class _Dtype:
    """A dtype of whole numbers. numpy's own takes its size and fields from the pickle unchecked,

    so that a wrong one crashes the process.
    """

    def __init__(self, code: str | bytes, *_: Any) -> None:
        if as_text(code) not in _CODES:
            raise pickle.UnpicklingError(f"an array of dtype {as_text(code)!r}, not whole numbers")
        self.numpy = np.dtype(as_text(code))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.numpy = self.numpy.newbyteorder(as_text(state[1]))  # type: ignore[arg-type]


class _Array(np.ndarray):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        super().__setstate__((1, shape, dtype.numpy, fortran, raw))


class _Unpickler(pickle.Unpickler):
    """Refuses every name but those that numpy writes for arrays and whole numbers.

    The functions are new in each unpickler: a pickle can set attributes on what it is given.
    """

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "numpy.ndarray": object,  # a mere argument of _reconstruct
            "numpy.dtype": _Dtype,
            "numpy.core.multiarray._reconstruct": lambda *_: _Array(0, np.uint8),
            "numpy.core.multiarray.scalar": lambda dtype, raw: int(
                np.frombuffer(raw, dtype.numpy, count=1)[0]
            ),
        }
        full = f"{module}.{name}"
        try:
            return allowed[full.replace("numpy._core.", "numpy.core.")]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {full}, which is refused") from None


def unpickle_arrays(raw: bytes, where: str) -> dict[Any, Any]:
    """The dict in a pickle that holds arrays and nothing that could run.

    >>> unpickle_arrays(pickle.dumps({"data": [1, 2]}), "memory")
    {'data': [1, 2]}
    >>> unpickle_arrays(pickle.dumps(print), "memory")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: memory cannot be read (it asks for builtins.print, which is refused); ...
    """
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            # The unpickler keeps a table of this size.
            if "PUT" in opcode.name and argument > len(raw):
                raise pickle.UnpicklingError(f"a memo of {argument:,} entries")
        value = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dict")
        return {k: v.view(np.ndarray) if isinstance(v, _Array) else v for k, v in value.items()}
    except Exception as error:  # damaged bytes can raise anything
        raise ValueError(
            f"{where} cannot be read ({error or type(error).__name__}); it is damaged, cut short "
            f"or not a CIFAR file: get it again"
        ) from error


def as_text(value: str | bytes) -> str:
    """A string of a pickle; those of Python 2 come as bytes."""
    return value.decode("latin1") if isinstance(value, bytes) else value
