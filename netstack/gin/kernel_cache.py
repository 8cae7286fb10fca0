"""Kernels that are kept from one start to the next, in the folder of LAMINA_CACHE, next to captures of models.

A file's name is a digest of all that determines its kernels. It begins with a digest of that and of the kernels. A file
that is torn, of another name, or perhaps written by another user is ignored, and its kernels are compiled again.
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
    """The file of kernels that ``facts`` determine. Neither reading nor writing fails."""

    def __init__(self, folder: Path, facts: Sequence[str]) -> None:
        self._name = hashlib.sha256(json.dumps(list(facts)).encode()).hexdigest()
        self.path = folder / f"{self._name}.cubin"
        self._file = CachedFile(self.path, largest=LARGEST, most_files=MOST_FILES)

    def read(self) -> bytes | None:
        """Return the kernels; None if there are none, or the file is not as this user wrote it."""
        data = self._file.read() or b""
        digest, image = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return image if image and digest == self._digest(image) else None

    def write(self, image: bytes) -> None:
        """Write the whole file or nothing, even if several processes do so at once."""
        self._file.write(self._digest(image) + image)

    def _digest(self, image: bytes) -> bytes:
        return hashlib.sha256(self._name.encode() + image).digest()
