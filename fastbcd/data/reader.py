"""Reading ahead: one thread of the process prepares what comes next."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Result = TypeVar("Result")


def ahead(work: Callable[[T], Result], items: Iterable[T]) -> Iterator[Result]:
    """work(item) for each item in order, prepared while the caller uses the one before it.

    >>> list(ahead(len, ["a", "bc"]))
    [1, 2]
    """
    thread = _reader(os.getpid())
    started: deque[Future[Result]] = deque()
    for item in items:
        started.append(thread.submit(work, item))
        if len(started) > 1:
            yield started.popleft().result()
    for last in started:
        yield last.result()


@cache
def _reader(process: int) -> ThreadPoolExecutor:
    """The thread of a process: a forked one needs its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="fastbcd images")
