"""The cluster's key, as an operator gives it to processes that Lamina does not start."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from .base import KEY_BYTES_MIN

KEY = "LAMINA_CLUSTER_KEY"
KEY_FILE = "LAMINA_CLUSTER_KEY_FILE"


def cluster_key(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the key of ``LAMINA_CLUSTER_KEY`` or of the file that ``LAMINA_CLUSTER_KEY_FILE`` names; None if neither
    is set. It is hexadecimal, 16 bytes or more. Raises ValueError for anything else, for both at once, and for a file
    that other users may access. No text quotes the key.
    """
    text, path = environ.get(KEY, ""), environ.get(KEY_FILE, "")
    if text and path:
        raise ValueError(f"both {KEY} and {KEY_FILE} are set: unset one")
    if path:
        text, source = _read(Path(path)), f"{KEY_FILE} {path}"
    elif text:
        source = KEY
    else:
        return None
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"{source} needs {2 * KEY_BYTES_MIN} hexadecimal digits or more: openssl rand -hex 32")
    return key


def _read(path: Path) -> str:
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{KEY_FILE} {path} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"{KEY_FILE} {path} is open to others: chmod 600 {path}")
    return text
