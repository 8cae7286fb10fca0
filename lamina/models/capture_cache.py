"""A cache of captures and proofs, since tracing a model takes most of the time of an engine's start.

A proof says that the model with the weights of certain files was run, and its rows found independent. A capture depends
on code, configuration, and the shapes of weights, never on their values. All of these are part of the name of its file,
in the folder of LAMINA_CACHE. A file that cannot be read is replaced by a new capture.
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
from .quantization.quantized_linear import packed_forms

PACKAGES = {"torch", "transformers", "lamina"}
CODE_FOLDERS = (
    "models",
    "models/quantization",
    "models/recurrent",
    "converter",
    "ops/attention",
    "ops/collective",
    "ops/gemm",
    "ops/recurrence",
)  # what a capture depends on
MAX_FILES = 256  # files in the folder; the least recently used ones are removed
MAX_FILE_BYTES = 64 << 20  # bytes of a file
LOCK_TIMEOUT_S = 120.0  # seconds for another process to capture
LOOK_S = 0.02
IMPORTED_S = time.time()  # files up to this time are the code that this process runs


class CaptureCache:
    """The file of one capture. Reads and writes do not fail: a missing capture is made again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def proof_file(self, stamps: Sequence[FileStamp]) -> CaptureCache:
        """Return the file of a proof for the model with the weights of exactly these files."""
        name = hashlib.sha256(json.dumps([self.path.stem, stamps]).encode()).hexdigest()
        return CaptureCache(self.path.with_name(f"{name}.json"))

    def read(self) -> str | None:
        """Return the stored text; None if there is none, or if another user may have written it."""
        data = self._file().read()
        with contextlib.suppress(ValueError):
            return None if data is None else data.decode()
        return None

    def write(self, text: str) -> None:
        """Write the text, whole or not at all, even if several processes do so at once."""
        self._file().write(text.encode())

    @contextlib.contextmanager
    def lock_for_capture(self) -> Iterator[None]:
        """Hold the lock to make a missing capture; the first process gets it, and others wait. They continue when the
        first one has left or ended, or after LOCK_TIMEOUT_S seconds. Otherwise replicas of a model would all trace it.
        """
        with contextlib.ExitStack() as after:
            with contextlib.suppress(OSError):  # no folder, or no locks: no process waits
                self._wait_or_hold(after)
            yield

    def _wait_or_hold(self, after: contextlib.ExitStack) -> None:
        path = self.path.with_suffix(".turn")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        after.callback(os.close, file)
        if _locked(file, fcntl.LOCK_EX):
            after.callback(_remove, path)
            return
        limit = time.monotonic() + LOCK_TIMEOUT_S
        while not _locked(file, fcntl.LOCK_SH) and time.monotonic() < limit:
            time.sleep(LOOK_S)  # flock has no timeout
        fcntl.flock(file, fcntl.LOCK_UN)

    def _file(self) -> CachedFile:
        return CachedFile(self.path, largest=MAX_FILE_BYTES, most_files=MAX_FILES)


def capture_file(model: nn.Module, **facts: object) -> CaptureCache | None:
    """Return the file of the capture of ``model``; None if there is no cache. None also if code outside of PACKAGES has
    made the model. ``facts``: other facts that tracing depends on.
    """
    if (folder := capture_directory()) is None:
        return None
    if {type(m).__module__.partition(".")[0] for m in model.modules()} - PACKAGES:
        return None
    import transformers

    try:
        identity = {
            "versions": [torch.__version__, transformers.__version__, platform.python_version()],
            "code": [own_code(), *_code_of(model)],
            "config": _configuration(model),
            "tensors": _tensors(model),
            "forms": packed_forms(model),
            "facts": {name: str(value) for name, value in facts.items()},
        }
    except OSError:  # code that cannot be read, or differs from the running code
        return None
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return CaptureCache(folder / f"{name}.json")


def can_cache(*, in_process: bool) -> bool:
    """Return whether captures depend on files alone. A caller's own process may have changed code in memory, so there
    LAMINA_CACHE must be set.
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
    """Return the folder of captures, which LAMINA_CACHE may set; None if that is empty."""
    return cache_directory("captures")


def _configuration(model: Any) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    identity.pop("_name_or_path", None)
    return identity


def _tensors(model: nn.Module) -> list[list[str]]:
    """Describe all tensors: names, which of them are the same tensor, shapes, strides, dtypes, devices."""
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
    """Return the names of the classes of a model's modules, and digests of their files; for torch the version
    suffices.
    """
    classes = {type(m) for m in model.modules()}
    files = {sys.modules[c.__module__].__file__ for c in classes if not c.__module__.startswith("torch.")}
    names = sorted(f"{c.__module__}.{c.__qualname__}" for c in classes)
    return [*names, *(file_digest(Path(file)) for file in sorted(filter(None, files)))]


@cache
def own_code() -> str:
    """Return a digest of Lamina's own files that route, capture and write. Raises OSError."""
    lamina = Path(__file__).resolve().parents[1]
    files = [path for folder in CODE_FOLDERS for path in sorted((lamina / folder).glob("*.py"))]
    return hashlib.sha256("".join(map(file_digest, files)).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return a file's digest. Raises OSError for code that has changed since this process read it."""
    if path.stat().st_ctime > IMPORTED_S:
        raise OSError(f"{path} is newer than this process")
    return hashlib.sha256(path.read_bytes()).hexdigest()
