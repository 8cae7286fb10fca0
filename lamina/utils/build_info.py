"""What computes here: Lamina's own code, native and not, and the instructions of this CPU. Two hosts that have the same
round alike.
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
    """16 hex digits: others where a byte of the code differs, or an instruction that the CPU has. Raises OSError."""
    return digest_of(Path(__file__).parents[1], instructions())


def digest_of(package: Path, also: str) -> str:
    """Of the code below ``package``, through links, by its names there, and of a text."""
    digest = hashlib.sha256(also.encode())
    files = (Path(at) / name for at, _, names in os.walk(package, followlinks=True) for name in names)
    for path in sorted(path for path in files if path.suffix in _CODE):
        with path.open("rb") as file:
            digest.update(f"\n{path.relative_to(package)} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()[:16]


def instructions() -> str:
    """Of this CPU, by Linux's names for them; elsewhere its architecture alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().lower().splitlines()
    except OSError:
        lines = []
    words = {word for line in lines if line.startswith(("flags", "features")) for word in line.split()}
    return " ".join([platform.machine(), *sorted(word for word in words if word.startswith(_KINDS))])
