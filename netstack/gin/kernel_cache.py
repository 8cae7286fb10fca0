"""Kernels that are kept from one start to the next, in the folder of LAMINA_CACHE, beside captures of models.

A file bears the name of all that its kernels follow from, and begins with a digest of that and of them: one that is
torn, of another name, or that somebody else may have written is as good as none, and its kernels are compiled again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from lamina.netstack.cached_file import CachedFile

MOST_FILES = 16
LARGEST = 256 << 20  # bytes of a file
DIGEST_BYTES = 32


class CachedImage:
    """The place of what follows from ``facts``. Neither reading nor writing fails."""

    def __init__(self, folder: Path, facts: Sequence[str]) -> None:
        self._name = hashlib.sha256(json.dumps(list(facts)).encode()).hexdigest()
        self.path = folder / f"{self._name}.cubin"
        self._file = CachedFile(self.path, largest=LARGEST, most_files=MOST_FILES)

    def read(self) -> bytes | None:
        """None where there is none, or where it is not as this user wrote it."""
        data = self._file.read() or b""
        digest, image = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return image if image and digest == self._digest(image) else None

    def write(self, image: bytes) -> None:
        """Whole or not at all, also where several processes do so at once."""
        self._file.write(self._digest(image) + image)

    def _digest(self, image: bytes) -> bytes:
        return hashlib.sha256(self._name.encode() + image).digest()
