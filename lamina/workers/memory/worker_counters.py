"""The counters of a memory worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Counters:
    """Seconds, counts and bytes by name; MemoryWorker.stats describes them."""

    def __init__(self) -> None:
        names = (
            "attend_s write_s score_s mix_s grant_s wait_s plan_s steps rows turns native_turns graph_turns refused "
        )
        names += "dropped stores connects stored_bytes bytes_received bytes_sent load_s save_s fetch_s kv_loaded_bytes "
        names += "kv_saved_bytes kv_peer_bytes kv_fetched_pages kv_failed_transfers move_s move_cpu_s moved_bytes "
        names += "remote_bytes state_loaded_bytes state_saved_bytes"
        self._values = dict.fromkeys(names.split(), 0.0)

    def snapshot(self) -> dict[str, float]:
        """Return the values since the start. Safe from any thread."""
        return dict(self._values)

    def add(self, name: str, value: float) -> None:
        """Add to the counter ``name``, which must exist."""
        self._values[name] += value

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the counter ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._values[name] += time.perf_counter() - start
