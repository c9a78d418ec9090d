"""Pickles read as data: arrays, numbers, strings and containers, and nothing that could run."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


class _StandIn:
    """What a pickle gets instead of a part of numpy. Having a __setstate__ keeps it from setting
    attributes on these classes themselves, which pickle would otherwise do."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets a state where none belongs")


class _Dtype(_StandIn):
    """Stands for numpy.dtype in a pickle: a type code and a byte order."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code, self.order = as_text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = as_text(state[1])

    def numpy(self) -> np.dtype:
        if self.code not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"):
            raise pickle.UnpicklingError(f"an array of dtype {self.code!r}, not of whole numbers")
        return np.dtype(("" if self.order == "|" else self.order) + self.code)


class _Array(_StandIn):
    """Stands for numpy.ndarray in a pickle: shape, dtype and bytes, until `array` reads them."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, fortran, raw = self.state
        flat = np.frombuffer(raw, dtype.numpy())
        return flat.reshape(shape, order="F" if fortran else "C")


class _Reconstruct(_StandIn):
    """Stands for numpy's _reconstruct(ndarray, shape, code): an array still to be filled."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()


class _Scalar(_StandIn):
    """Stands for numpy's scalar(dtype, bytes): a whole number."""

    def __new__(cls, dtype: _Dtype, raw: bytes) -> Any:
        return int(np.frombuffer(raw, dtype.numpy(), count=1)[0])


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    **{
        (f"numpy.{core}.multiarray", name): stand_in
        for core in ("core", "_core")
        for name, stand_in in (("_reconstruct", _Reconstruct), ("scalar", _Scalar))
    },
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads containers, numbers, strings and arrays. Whatever else is named is refused."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused") from None


def unpickle_arrays(raw: bytes, where: str) -> dict[Any, Any]:
    """The dict in a pickle that holds arrays and nothing that could run.

    >>> unpickle_arrays(pickle.dumps({"data": [1, 2]}), "memory")
    {'data': [1, 2]}
    >>> unpickle_arrays(pickle.dumps(print), "memory")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: memory cannot be read (it asks for builtins.print, which is refused); ...
    """
    try:
        value = _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dict")
        return {k: v.array() if isinstance(v, _Array) else v for k, v in value.items()}
    # The bytes are not ours: any of the virtual machine's own failures may come out of them.
    except Exception as error:
        raise ValueError(
            f"{where} cannot be read ({error or type(error).__name__}); it is damaged, cut short "
            f"or not a CIFAR file: get it again"
        ) from error


def as_text(value: str | bytes) -> str:
    """A string of a pickle; those of Python 2 come as bytes."""
    return value.decode("latin1") if isinstance(value, bytes) else value
