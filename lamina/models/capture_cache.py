"""Captures that are kept from one start to the next: tracing a model is most of the time until an engine can serve.
So are proofs: that the model was run and its rows found apart, with the weights of certain files.

A capture follows from code, configuration, and the shapes of weights; never from their values. All of it is in the
name of its file, in the folder of LAMINA_CACHE. Whatever cannot be read is captured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lamina.netstack.cached_file import VARIABLE, CachedFile, cache_directory

from .checkpoint import FileStamp

PACKAGES = {"torch", "transformers", "lamina"}
MAX_FILES = 256  # of the folder; those that have not been used for the longest time go
MAX_FILE_BYTES = 64 << 20  # bytes of a file
LOCK_TIMEOUT_S = 120.0  # for another process to capture
LOOK_S = 0.02
_IMPORTED_S = time.time()  # of code that is as old as this module, or older


class CaptureCache:
    """One capture's place. Neither reading nor writing fails: what is not there is made again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def proof_file(self, stamps: Sequence[FileStamp]) -> CaptureCache:
        """The place of what was shown of the model with the weights of just these files."""
        name = hashlib.sha256(json.dumps([self._path.stem, stamps]).encode()).hexdigest()
        return CaptureCache(self._path.with_name(f"{name}.json"))

    def read(self) -> str | None:
        """The kept text; None where there is none, or where another user may have written it."""
        data = self._file().read()
        with contextlib.suppress(ValueError):
            return None if data is None else data.decode()
        return None

    def write(self, text: str) -> None:
        """Whole or not at all, also where several processes do so at once."""
        self._file().write(text.encode())

    @contextlib.contextmanager
    def lock_for_capture(self) -> Iterator[None]:
        """Of processes that lack this at once the first one goes on, to make it. The others go on when that one has
        left, has ended, or has taken LOCK_TIMEOUT_S: replicas of a model would trace it side by side.
        """
        with contextlib.ExitStack() as after:
            with contextlib.suppress(OSError):  # no folder, or no locks: nobody waits
                self._wait_or_hold(after)
            yield

    def _wait_or_hold(self, after: contextlib.ExitStack) -> None:
        path = self._path.with_suffix(".turn")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        after.callback(os.close, file)
        if _locked(file, fcntl.LOCK_EX):
            after.callback(_remove, path)
            return
        limit = time.monotonic() + LOCK_TIMEOUT_S
        while not _locked(file, fcntl.LOCK_SH) and time.monotonic() < limit:
            time.sleep(LOOK_S)  # flock knows no deadline
        fcntl.flock(file, fcntl.LOCK_UN)

    def _file(self) -> CachedFile:
        return CachedFile(self._path, largest=MAX_FILE_BYTES, most_files=MAX_FILES)


def capture_file(model: nn.Module, **facts: object) -> CaptureCache | None:
    """The place of the capture of ``model``, which code of PACKAGES has made by its configuration; None where none are
    kept. ``facts``: whatever else tracing depends on.
    """
    if (folder := capture_directory()) is None:
        return None
    if {type(m).__module__.partition(".")[0] for m in model.modules()} - PACKAGES:
        return None
    import transformers

    try:
        identity = {
            "versions": [torch.__version__, transformers.__version__, platform.python_version()],
            "code": [_own_code(), *_code_of(model)],
            "config": _configuration(model),
            "tensors": _tensors(model),
            "facts": {name: str(value) for name, value in facts.items()},
        }
    except OSError:  # code that cannot be read, or is not what runs here
        return None
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return CaptureCache(folder / f"{name}.json")


def can_cache(*, in_process: bool) -> bool:
    """Whether what is captured here follows from files. A caller's own process may have changed code in memory: there
    LAMINA_CACHE has to be set.
    """
    return not in_process or VARIABLE in os.environ


def _locked(file: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def capture_directory() -> Path | None:
    """What LAMINA_CACHE says, where it is set; empty = none."""
    return cache_directory("captures")


def _configuration(model: Any) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    identity.pop("_name_or_path", None)
    return identity


def _tensors(model: nn.Module) -> list[list[str]]:
    """Names, and which of them are one tensor; shapes, strides, dtypes, devices."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [
        [name, first.setdefault(id(t), name), str(tuple(t.shape)), str(t.stride()), str(t.dtype), str(t.device)]
        for name, t in named
    ]


def _code_of(model: nn.Module) -> list[str]:
    """The names of the classes of a model's modules, and digests of their files; of torch the version says enough."""
    classes = {type(m) for m in model.modules()}
    files = {sys.modules[c.__module__].__file__ for c in classes if not c.__module__.startswith("torch.")}
    names = sorted(f"{c.__module__}.{c.__qualname__}" for c in classes)
    return [*names, *(_digest(Path(file)) for file in sorted(filter(None, files)))]


@cache
def _own_code() -> str:
    """A digest of Lamina's own files that route, capture and write. Raises OSError."""
    lamina = Path(__file__).resolve().parents[1]
    files = [
        path
        for room in ("models", "converter", "attention", "collective")
        for path in sorted((lamina / room).glob("*.py"))
    ]
    return hashlib.sha256("".join(map(_digest, files)).encode()).hexdigest()


def _digest(path: Path) -> str:
    """Raises OSError for code that has changed since this process read it."""
    if path.stat().st_ctime > _IMPORTED_S:
        raise OSError(f"{path} is newer than this process")
    return hashlib.sha256(path.read_bytes()).hexdigest()
