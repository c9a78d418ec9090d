"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Replace a file. After a kill at any moment it is either the old file or the whole new one.

    keep: the name that the old file gets once the new one is on disk; after a kill at that moment
    only the kept file is there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # without it a rename may be lost in a power cut
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)
