"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], keep: Path | None = None
) -> None:
    """Replace a file. After a kill at any moment it is either the old file or the whole new one.

    keep: the name that the old file gets once the new one is on disk; after a kill at that moment
    only the kept file is there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # without it a rename may be lost in a power cut
        finally:
            os.close(descriptor)
    finally:
        temporary.unlink(missing_ok=True)
