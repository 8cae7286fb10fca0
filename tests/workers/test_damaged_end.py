"""The end of a worker that must not go on."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest

from lamina.workers import worker_process


class FullDisk(io.StringIO):
    """A log that takes no line any more."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_it_ends_at_once_also_where_nobody_can_be_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would fail with a reason, and end the run with it."""
    ended = list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    worker_process.exit_now("its memory is damaged")
    assert ended == [1]
