"""Keep memory in the process that is freed and allocated again thousands of times.

glibc returns blocks beyond 32 MiB to the system at once, and the page faults of getting them back
cost a tenth of a ResNet18's training step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of <malloc.h>


@contextmanager
def kept_memory() -> Iterator[None]:
    """Freed blocks of any size stay in the process.

    Afterwards glibc returns what is free beyond 64 MiB as blocks are freed. Less is kept, so that
    the next call does not fault it in again.

    >>> with kept_memory():
    ...     x = torch.zeros(8)
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another allocator
        yield
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        # The thresholds that glibc adapts to in a process that has used large blocks.
        mallopt(_M_MMAP_MAX, 65536)
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**26)
