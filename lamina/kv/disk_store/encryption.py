"""Encryption of fragments on disk: AES-256-GCM, or plain bytes with the tag of AES-GCM for unencrypted data (GMAC).

A record has a key of its own, an HMAC under the data key of the page's tenant. It covers a random number and all that
the index says of the page. A fragment's layer and head are its nonce, which is unique in the record. So bytes of
another fragment, record, page or tenant are not accepted, nor is a page whose index entry has changed.
"""

from __future__ import annotations

import hmac
import os
import struct
from errno import EIO
from secrets import token_bytes

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lamina.kv.page_keys import data_key_wrapper
from lamina.kv.pages import Page, PageFragment

from .store_directory import KEY, StoreDirectory

TAG_BYTES = 16
SALT_BYTES = 16
_KEY_BYTES = 32
_NONCE_BYTES = 12
_ATOM_NONCE = struct.Struct("<IIxxxx")


class IntegrityError(Exception):
    """The bytes are not those that were written."""


class FragmentCipher:
    """The cipher of the fragments of one record. Any thread may use it."""

    def __init__(self, data_key: bytes, salt: bytes, page: Page, *, encrypt: bool) -> None:
        """``salt``: SALT_BYTES that no other record of this tenant has."""
        associated_data = msgspec.msgpack.encode((*page, encrypt))
        self._cipher = AESGCM(hmac.digest(data_key, b"lamina kv record 1" + salt + associated_data, "sha256"))
        self._encrypt = encrypt

    def encrypt(self, fragment: PageFragment, data: memoryview, out: memoryview) -> bytes:
        """Encrypt ``data`` into ``out``, which has TAG_BYTES more, with any contents. Returns the tag."""
        nonce = _ATOM_NONCE.pack(*fragment)
        if self._encrypt:
            self._cipher.encrypt_into(nonce, data, None, out)
            return bytes(out[data.nbytes :])
        out[: data.nbytes] = data
        return self._cipher.encrypt(nonce, b"", data)

    def decrypt(self, fragment: PageFragment, sealed: memoryview, tag: bytes, out: memoryview) -> None:
        """Decrypt into ``out``. ``sealed``: the encrypted bytes, followed by TAG_BYTES that keep their contents. Raises
        IntegrityError; then ``out`` holds anything.
        """
        nonce = _ATOM_NONCE.pack(*fragment)
        trailing = bytes(sealed[out.nbytes :])
        try:
            if self._encrypt:
                sealed[out.nbytes :] = tag
                self._cipher.decrypt_into(nonce, sealed, None, out)
            else:
                out[:] = sealed[: out.nbytes]
                self._cipher.decrypt(nonce, tag, out)  # checks the caller's copy
        except InvalidTag:
            raise IntegrityError(f"layer {fragment.layer}, head {fragment.head}") from None
        finally:
            sealed[out.nbytes :] = trailing


class DataKeys:
    """The data keys, one for each tenant, each in a file of its own and encrypted by the store's secret. Without its
    file, all data of the tenant in the store is unreadable.
    """

    def __init__(self, folder: StoreDirectory, secret: bytes) -> None:
        self._folder = folder
        self._cipher = AESGCM(data_key_wrapper(secret))
        self._known: dict[bytes, bytes] = {}

    def get(self, tenant: bytes) -> bytes | None:
        """Return the key of ``tenant``; None if it was destroyed, or belongs to another secret. Raises OSError."""
        if tenant not in self._known:
            wrapped = self._folder.read(KEY + tenant.hex())
            key = None if wrapped is None else self._unwrapped(tenant, wrapped)
            if key is None:
                return None
            self._known[tenant] = key
        return self._known[tenant]

    def make(self, tenant: bytes) -> bytes:
        """Return the key of ``tenant``, which is created if missing. Raises OSError, also if the stored key is
        damaged.
        """
        key = self.get(tenant)
        if key is not None:
            return key
        nonce = token_bytes(_NONCE_BYTES)
        wrapped = nonce + self._cipher.encrypt(nonce, token_bytes(_KEY_BYTES), tenant)
        key = self._unwrapped(tenant, self._folder.create(KEY + tenant.hex(), wrapped))
        if key is None:
            raise OSError(EIO, f"{KEY}{tenant.hex()} is damaged: purge the store")
        self._known[tenant] = key
        return key

    def _unwrapped(self, tenant: bytes, wrapped: bytes) -> bytes | None:
        try:
            return self._cipher.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], tenant)
        except (InvalidTag, ValueError):
            return None


def destroy_data_key(folder: StoreDirectory, tenant: bytes) -> bool:
    """Overwrite and remove a data key; returns False if there is none. Raises OSError."""
    name = KEY + tenant.hex()
    try:
        fd = folder.open(name, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        os.pwrite(fd, token_bytes(os.fstat(fd).st_size), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    folder.remove(name)
    folder.sync()
    return True
