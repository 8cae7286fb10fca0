"""A store by which a process group of torch finds the other ranks; its keys travel over the ranks' own mesh.

torch's stores accept connections of any process. This one sends what a rank sets over channels that have proven the
cluster's key, and does not listen. It serves while the group opens; then it is closed, and the mesh only carries
tensors again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from lamina.netstack import ChannelTimeout, PeerFault

from .mesh import SLOT_BYTES, MeshCollective

_KEY = struct.Struct("<I")  # bytes of the key, which follows; after it the value
_END = b""
MAX_KEYS = 1024


class MeshStore(Store):
    """One rank's end of the store. One thread sets and waits; any thread may read what is there."""

    def __init__(self, mesh: MeshCollective, timeout_s: float) -> None:
        """``timeout_s``: seconds for all calls together."""
        super().__init__()
        self._mesh, self._deadline = mesh, time.monotonic() + timeout_s
        self._known: dict[str, bytes] = {}
        self._open = set(range(mesh.size)) - {mesh.rank}  # ranks that may still send
        self._closed = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key, and send it to all other ranks. Raises ChannelError."""
        self._known[key] = data = value.encode() if isinstance(value, str) else bytes(value)
        if not self._closed:
            name = key.encode()
            self._mesh.send_letter(_KEY.pack(len(name)) + name + data)

    def get(self, key: str) -> bytes:
        """Return the value of a key, after a rank has set it. Raises ChannelError."""
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are set; all waits end at one deadline, not at ``timeout``. Raises ChannelError."""
        while missing := [key for key in keys if key not in self._known]:
            if self._closed or not self._open:
                raise PeerFault(f"rank {self._mesh.rank}: no rank sets {missing[0]!r}, which a process group needs")
            self._hear()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` are set, without waiting."""
        return all(key in self._known for key in keys)

    def close(self) -> None:
        """Wait until all ranks have all keys that they need. Raises ChannelError."""
        self._mesh.send_letter(_END)
        while self._open:
            self._hear()
        self._closed = True

    def _hear(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0.0:
            raise ChannelTimeout(f"rank {self._mesh.rank}: ranks {sorted(self._open)} do not open their process group")
        rank, letter = self._mesh.receive_letter(self._open, left_s)
        if letter == _END:
            self._open.discard(rank)
            return
        (length,) = _KEY.unpack_from(letter) if len(letter) >= _KEY.size else (SLOT_BYTES,)
        if _KEY.size + length > len(letter) or len(self._known) >= MAX_KEYS:
            raise PeerFault(f"rank {rank} sends {len(letter)} B that are no key and value")
        key = letter[_KEY.size :][:length].decode(errors="replace")
        self._known[key] = letter[_KEY.size + length :]
