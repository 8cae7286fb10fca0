"""Facts that the kernel shows as files, in /sys and /proc."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str:
    """Return a file's text without the space around it; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; none if it does not exist."""
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError:
        return []
