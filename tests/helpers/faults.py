"""Faults at file operations: an end of the process, or an error, at the n-th operation.

An operation is a rename, a sync, a removal, a new folder or a write. A fault happens before it,
after it, or inside a write, when half of the bytes are in the file. An end is simulated: from then
on every operation of the process fails, also those of its `finally` blocks.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WHEN = ("before", "inside", "after")
OPERATIONS = ("replace", "rename", "fsync", "unlink", "remove", "mkdir")


class Ended(BaseException):
    """The process was killed here."""


class Faults:
    """Counts file operations; the one with number `at` (from 1) fails.

    kind: "end" or "error" (the disk is full, once).
    """

    def __init__(self, at: int, when: str, kind: str) -> None:
        self.at, self.when, self.kind = at, when, kind
        self.count, self.ended = 0, False

    def fail(self) -> None:
        if self.kind == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.ended = True
        raise Ended

    def operation(self, work: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Do the work of one operation, or fail; half: do half of it."""
        if self.ended:
            raise Ended
        self.count += 1
        hit = self.count == self.at
        if hit and self.when == "before":
            self.fail()
        if hit and self.when == "inside" and half is not None:
            half()
            self.fail()
        result = work()
        if hit and self.when != "before":
            self.fail()
        return result

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: self.operation(lambda: function(*args, **options))

    def opened(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        file = REAL_OPEN(path, mode, *rest, **options)
        return _Written(file, self) if set(mode) & set("wax+") else file

    @contextmanager
    def active(self) -> Iterator[Faults]:
        """From here on, in this process."""
        real = {name: getattr(os, name) for name in OPERATIONS}
        try:
            for name, function in real.items():
                setattr(os, name, self.counted(function))
            builtins.open = io.open = self.opened  # type: ignore[assignment]
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            builtins.open = io.open = REAL_OPEN


class _Written:
    """A file whose writes are operations and reach the disk at once."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, content: Any) -> int:
        def put(part: Any) -> None:
            self._file.write(part)
            self._file.flush()

        half = content[: len(content) // 2]
        self._faults.operation(lambda: put(content), lambda: put(half))
        return len(content)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


REAL_OPEN = io.open
