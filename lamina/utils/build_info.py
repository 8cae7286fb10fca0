"""The identity of the code and CPU that compute: Lamina's files, native ones too, and the CPU's instructions. Two hosts
with equal ones round alike.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

_CODE = ".py", ".so"
_KINDS = "avx", "amx", "fma", "f16c", "sse", "asimd", "sve"  # of instructions that compute


@cache
def build_id() -> str:
    """Return 16 hex digits that differ if a byte of the code or an instruction of the CPU does. Raises OSError."""
    return digest_of(Path(__file__).parents[1], instructions())


def digest_of(package: Path, also: str) -> str:
    """Return the digest of the code below ``package``, links followed, with its relative names, and of a text."""
    digest = hashlib.sha256(also.encode())
    files = (Path(at) / name for at, _, names in os.walk(package, followlinks=True) for name in names)
    for path in sorted(path for path in files if path.suffix in _CODE):
        with path.open("rb") as file:
            digest.update(f"\n{path.relative_to(package)} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()[:16]


def instructions() -> str:
    """Return this CPU's computing instructions, by Linux's names for them; elsewhere only its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().lower().splitlines()
    except OSError:
        lines = []
    words = {word for line in lines if line.startswith(("flags", "features")) for word in line.split()}
    return " ".join([platform.machine(), *sorted(word for word in words if word.startswith(_KINDS))])
