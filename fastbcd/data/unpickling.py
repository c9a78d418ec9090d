"""Pickles read as data: arrays of whole numbers, numbers, strings and containers, nothing else."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

_CODES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


class _Dtype:
    """A dtype of whole numbers; numpy's own can crash when a pickle sets its size and fields."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        if _text(code) not in _CODES:
            raise pickle.UnpicklingError(f"an array of dtype {_text(code)!r}, not whole numbers")
        self.numpy = np.dtype(_text(code))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.numpy = self.numpy.newbyteorder(_text(state[1]))  # type: ignore[arg-type]


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
        found = allowed.get(f"{module}.{name}".replace("numpy._core.", "numpy.core."))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return found


def unpickle_arrays(raw: bytes, where: str) -> dict[str, Any]:
    """What a pickled dict holds under strings: arrays, and nothing that could run."""
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            # The unpickler keeps a table of this size.
            if "PUT" in opcode.name and int(argument or 0) > len(raw):
                raise pickle.UnpicklingError(f"a memo of {argument:,} entries")
        value = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, not a dict")
        arrays = {_text(k): v for k, v in value.items() if isinstance(k, str | bytes)}
        return {k: v.view(np.ndarray) if isinstance(v, _Array) else v for k, v in arrays.items()}
    except Exception as error:  # damaged bytes can raise anything
        raise ValueError(
            f"{where} cannot be read ({error or type(error).__name__}); it is damaged, cut short "
            f"or not a CIFAR file: get it again"
        ) from error


def _text(value: str | bytes) -> str:
    """A string of a pickle; those of Python 2 come as bytes."""
    return value.decode("latin1") if isinstance(value, bytes) else value
