"""Compiled kernels that are kept from one start to the next, in the folder of LAMINA_CACHE. A digest of all that
determines them is the name of their file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lamina.netstack.cached_file import CachedFile, cache_directory

MOST_FILES = 16  # kept
LARGEST = 256 << 20  # bytes of a file


def kept_or_built(facts: Sequence[str], build: Callable[[], bytes]) -> bytes:
    """Return the kernels that ``facts`` determine: those that are kept, or what ``build`` makes, which is kept then."""
    folder = cache_directory("kernels")
    kept = kept_image(folder, facts) if folder else None
    image = kept.read() if kept else None
    if not image:
        image = build()
        if kept:
            kept.write(image)
    return image


def kept_image(folder: Path, facts: Sequence[str]) -> CachedFile:
    """Return the file of the kernels that ``facts`` determine."""
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return CachedFile(folder / f"{name}.cubin", largest=LARGEST, most_files=MOST_FILES)


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the files' paths and contents. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(files):
        text = path.read_bytes()
        digest.update(f"{path}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def sources(csrc: Path) -> list[Path]:
    """Return the files that kernels.cu consists of."""
    return [path for path in (csrc / "netstack").rglob("*") if path.suffix in (".cu", ".h")]
