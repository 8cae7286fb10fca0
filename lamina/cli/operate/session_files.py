"""Files of exported sessions: encrypted, and readable only by their owner. They contain the conversation's tokens."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_bytes

MAGIC = b"lamina session 1\n"
_NONCE_BYTES = 12
_MOST_BYTES = 1 << 28


def write_session(path: str, key_file: str, data: bytes) -> None:
    """A new file, of mode 0600. Raises ValueError where it cannot be made."""
    cipher, nonce = _cipher(key_file), token_bytes(_NONCE_BYTES)
    sealed = MAGIC + nonce + cipher.encrypt(nonce, data, MAGIC)
    try:
        fd = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise ValueError(f"--file {path}: it is there: name a new one, or remove it") from None
    except OSError as e:
        raise ValueError(f"--file {path}: {e.strerror}: name a file that can be made") from None
    with os.fdopen(fd, "wb") as file:
        file.write(sealed)


def read_session(path: str, key_file: str) -> bytes:
    """Return the session that was written. Raises ValueError for another file, or another key."""
    from cryptography.exceptions import InvalidTag

    cipher = _cipher(key_file)
    try:
        with Path(path).expanduser().open("rb") as file:
            sealed = file.read(_MOST_BYTES)
    except OSError as e:
        raise ValueError(f"--file {path}: {e.strerror}: name one that sessions export has made") from None
    nonce, data = sealed[len(MAGIC) :][:_NONCE_BYTES], sealed[len(MAGIC) + _NONCE_BYTES :]
    try:
        if sealed[: len(MAGIC)] == MAGIC and len(nonce) == _NONCE_BYTES:
            plain: bytes = cipher.decrypt(nonce, data, MAGIC)
            return plain
    except InvalidTag:
        pass
    raise ValueError(f"--file {path}: it is no exported session, is damaged, or was made with another --key-file")


def _cipher(key_file: str):  # type: ignore[no-untyped-def]
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from lamina.kv.disk_store.store_directory import read_secret

    return AESGCM(read_secret(key_file, "--key-file"))
