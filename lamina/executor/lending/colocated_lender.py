"""An engine that serves and lends its own memory (``lend`` of --lending): a creditor on threads of its process.

The memory to lend is outside of the engine's pool from the start. The engine borrows it as other engines do, but before
them. Memory that it lacks is recalled from its debtors, and comes back as one more memory worker of the engine.
"""

from __future__ import annotations

import math
import socket
import threading

from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name
from lamina.lending.creditor import LendingTerms
from lamina.lending.lending_messages import NEVER
from lamina.scheduler.slo_admission import SloCounts

from .lender_service import BLOCK_BYTES, LenderService
from .lending_listener import Place, parse_address

END_S = 1.0  # for its thread


class ColocatedLender:
    """The engine's own creditor. ``local_need``: why the engine does not lend more now, "" = it may. ``lacks_since``:
    since when it lacks memory itself, NEVER if it does not.
    """

    def __init__(self, config: EngineConfig, ledger: Place, key: bytes, name: str) -> None:
        """Lend from now on. Raises ValueError, and OSError if it cannot listen or there is no ledger."""
        asked, launching = config.devices.kv_bytes(), config.launch
        blocks = config.topology.lent_bytes(asked) // BLOCK_BYTES
        if not blocks:
            raise ValueError(
                f"{flag_name('lend')} {config.topology.lend:g} of --kv-cache-memory-bytes {config.devices.kv_memory} "
                "is less than 1 MiB on all memory workers together: lend more, or leave it out"
            )
        self.local_need, self.lacks_since = "", NEVER
        self.service = LenderService(
            parse_address(launching.lend_address, flag_name("lend_address")),
            ledger,
            key,
            name,
            blocks,
            LendingTerms(blocks, blocks, location=launching.lending_place or socket.gethostname()),
            threads=config.devices.memory_threads,
            most_gbps=launching.lend_gbps or math.inf,
            needs=lambda: self.local_need,
            lacks_since=lambda: self.lacks_since,
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.service.serve, args=(self._over,), name="lamina-lend", daemon=True)
        self._thread.start()

    @property
    def lent_blocks(self) -> dict[str, int]:
        """The lent blocks by the deployment that has them."""
        return self.service.lent_blocks

    def close(self) -> None:
        """End all guests. Idempotent."""
        self._over.set()
        self.service.close()
        self._thread.join(END_S)


def overload_reason(promised: SloCounts | None) -> str:
    """Return why an engine's load leaves nothing to lend, by its SLO admission, in words; "" = it does not."""
    load = max(promised.prefill_load, promised.decode_load) if promised is not None else 0.0
    return f"its own load is {load:.2f} of what its promises allow" if load > 1.0 else ""
