"""Memory that is taken before a store needs it, and the stores that are made in it: never a second one beside it."""

from __future__ import annotations

import logging
import threading
from itertools import chain

import torch

from lamina.facts.host_memory import not_enough_memory_message
from lamina.kv.arena import HUGE_PAGE, HugePageArena, prefault
from lamina.protocol.offload_messages import OffloadConfig
from lamina.protocol.step_plan import BindRequest
from lamina.workers.device_selection import CPU

from .kv_store import KvStore, available_bytes, shapes_by_layer
from .offload.page_capacity import page_capacity
from .worker_counters import Counters

log = logging.getLogger(__name__)


class StorePreallocation:
    """Of one memory worker. ``prepare`` is safe from any thread; all else is for the thread that serves."""

    def __init__(self, device: torch.device, share: float, meter: Counters) -> None:
        """``share``: see Store."""
        self.arena = HugePageArena()  # for the layers of the next one
        self._device, self._share, self._meter = device, share, meter
        self._lock = threading.Lock()
        self._had_store = False  # a store

    def prepare(
        self, bind: BindRequest | None, offload: OffloadConfig | None, store: KvStore | None, *, is_first_store: bool
    ) -> None:
        """Take memory for the store of ``bind``: for all of it, or where there is a ``store``, which gives up its own
        layer by layer, for one layer of each form. ``is_first_store``: for the first one; nothing happens where there
        has been one. None: what was taken goes back. Raises as Store, and as page_capacity for ``offload``.
        """
        with self._lock:
            if is_first_store and self._had_store:
                return
            self.arena.clear()
            if bind is None:
                return
            if offload is not None:
                page_capacity(offload, bind, bind.kv_bytes)
            if is_first_store and bind.kv_bytes > (free := available_bytes(self._device)):
                raise ValueError(not_enough_memory_message(bind.kv_bytes, free))
            layers = shapes_by_layer(bind) if self._device == CPU else []
            for shapes in layers if store is None else dict.fromkeys(map(tuple, layers)):
                self.arena.prepare(shapes, HUGE_PAGE if is_first_store else 0)  # another place may have a little more

    def open_store(self, bind: BindRequest) -> KvStore:
        """A store where there is none, in memory that was made ready if it does for all of it; else that goes back
        first, as both may not fit. Raises as Store.
        """
        with self._lock:  # what is being made ready is ready before
            self._had_store, given = True, self.arena.nbytes
            if given and self.arena.can_allocate(chain(*shapes_by_layer(bind))):
                store = KvStore(bind, self._device, self._share, slabs=self.arena, given=given)
                for _ in bind.layers:
                    prefault(
                        x for piece in store.allocate_next_layer() for x in piece.kv.tensors
                    )  # pages are there, but for a few
            else:
                if given:
                    log.warning("%d bytes of memory were made ready for a store of another size: they go back", given)
                self.arena.clear()
                store = KvStore(bind, self._device, self._share)
            self.arena.clear()
        self._meter.add("stores", 1)
        return store

    def open_resharded_store(self, bind: BindRequest, given: int) -> KvStore:
        """A store whose layers are still to be made, in memory that was made ready, and in ``given`` bytes of another
        store that become free meanwhile. Raises as Store.
        """
        with self._lock:
            self._had_store = True
            store = KvStore(bind, self._device, self._share, slabs=self.arena, given=self.arena.nbytes + given)
        self._meter.add("stores", 1)
        return store
