"""The limits of a memory worker on loan, whose debtor may be any process with the cluster's key.

It takes no more memory than was lent, stores nothing outside of its pool, and has no devices. It reports to its host
how much it reads. A memory worker that is not on loan has none of these limits.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

from lamina.config.conflicts import conflict_text
from lamina.env import lease_bytes, lease_meter
from lamina.kv.storage import STORES_NOTHING
from lamina.netstack import ListenTerms

READ_COUNTER = struct.Struct("<d")  # bytes that attention has read
READ_COUNTER_INTERVAL_S = 0.5
MAX_CHANNELS = 32
MAX_INBOX_BYTES = 256 << 20  # bytes of a channel's inboxes, both directions together


def check_lease(kv_bytes: int) -> None:
    """Raise ValueError if ``kv_bytes`` exceeds the memory that was lent."""
    if 0 < (lease := lease_bytes()) < kv_bytes:
        raise ValueError(f"{kv_bytes} bytes are requested of a memory worker that was lent with {lease}")


def check_allowed_for_guest(what: str, wanted: bool) -> None:
    """Raise ValueError if ``what``, a setting that excludes loans, is wanted on a memory worker on loan."""
    if wanted and lease_bytes():
        raise ValueError(conflict_text("--lending borrow.max", what))


def check_keeps_no_pages(backend: str) -> None:
    """Raise ValueError on a memory worker on loan, unless the storage backend stores nothing: any other one takes
    memory or files of the host.
    """
    if lease_bytes() and backend != STORES_NOTHING:
        raise ValueError("a memory worker on loan is requested to store pages outside of the memory that was lent")


def listener_terms(name: str) -> ListenTerms:
    """Return the terms of a memory worker's listener. Raises ValueError for a bad name."""
    if not lease_bytes():
        return ListenTerms(name=name)
    return ListenTerms(name=name, inbox_bytes=MAX_INBOX_BYTES, channels=MAX_CHANNELS)


def publish_reads(stats: Callable[[], dict[str, float]]) -> None:
    """Publish the bytes of K and V that attention has read, from a thread that runs as long as this process. It writes
    to the file that the creditor has given. Does nothing if the worker is not on loan.
    """
    if (meter := lease_meter()) is None:
        return

    def tell() -> None:
        never = threading.Event()
        while not never.wait(READ_COUNTER_INTERVAL_S):
            os.pwrite(meter, READ_COUNTER.pack(stats()["stored_bytes"]), 0)

    threading.Thread(target=tell, name="lamina-lease-meter", daemon=True).start()
