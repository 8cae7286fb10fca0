"""Background work that must not delay other threads and processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
NICENESS = 5  # added to the thread's niceness: a third of the weight (sched(7))


class LowPriorityCall(Generic[T]):
    """Runs ``work()`` on a thread of low priority; Linux has a niceness for each thread.

    While workers start, five processes import libraries. With fewer cores than that, four of them wait for the one that
    loads and cuts the model.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._began = monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, limit_s: float | None = None) -> T:
        """Wait for ``work`` and return its result. Raises its exception, or TimeoutError ``limit_s`` seconds after the
        start of ``work``, not of this call.
        """
        self._thread.join(None if limit_s is None else max(0.0, self._began + limit_s - monotonic()))
        if self._error is not None:
            raise self._error
        if not self._found:
            raise TimeoutError(f"{self._thread.name} is not done after {limit_s:g} s")
        return self._found[0]

    def _run(self) -> None:
        with suppress(OSError):
            os.nice(NICENESS)  # of this thread alone
        try:
            self._found.append(self._work())
        except BaseException as e:  # noqa: BLE001 - for the caller of ``result``
            self._error = e
