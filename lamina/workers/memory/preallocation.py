"""Memory that is allocated before a store needs it, and stores in that memory. Two whole stores never exist at a
time.
"""

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
    """The preallocated memory of one memory worker. ``prepare`` is safe from any thread; only the thread that serves
    calls other methods.
    """

    def __init__(self, device: torch.device, share: float, meter: Counters) -> None:
        """``share``: see KvStore."""
        self.arena = HugePageArena()  # for the layers of the next store
        self._device, self._share, self._meter = device, share, meter
        self._lock = threading.Lock()
        self._had_store = False  # if there was a store

    def prepare(
        self, bind: BindRequest | None, offload: OffloadConfig | None, store: KvStore | None, *, is_first_store: bool
    ) -> None:
        """Allocate memory for the store of ``bind``; None frees what was allocated. If there is a ``store``, which
        frees its layers one by one, memory for one layer of each shape suffices. ``is_first_store``: does nothing if
        there was a store. Raises as KvStore, and as page_capacity for ``offload``.
        """
        with self._lock:
            if is_first_store and self._had_store:
                return
            self.arena.clear()
            if bind is None:
                return
            if offload is not None and offload.keeps:
                page_capacity(offload, bind, bind.kv_bytes)
            if is_first_store and bind.kv_bytes > (free := available_bytes(self._device)):
                raise ValueError(not_enough_memory_message(bind.kv_bytes, free))
            layers = shapes_by_layer(bind) if self._device == CPU else []
            for shapes in layers if store is None else dict.fromkeys(map(tuple, layers)):
                self.arena.prepare(shapes, HUGE_PAGE if is_first_store else 0)  # the final Bind may need a little more

    def open_store(self, bind: BindRequest) -> KvStore:
        """Open a store if there is none, in the allocated memory if that suffices for all of it. Otherwise that memory
        is freed first, as both may not fit. Raises as KvStore.
        """
        with self._lock:  # waits for a preparation that is under way
            self._had_store, given = True, self.arena.nbytes
            if given and self.arena.can_allocate(chain(*shapes_by_layer(bind))):
                store = KvStore(bind, self._device, self._share, slabs=self.arena, given=given)
                for _ in bind.layers:
                    prefault(
                        x for piece in store.allocate_next_layer() for x in piece.kv.tensors
                    )  # most of them are mapped already
            else:
                if given:
                    log.warning("%d bytes of memory were prepared for a store of another size and are freed", given)
                self.arena.clear()
                store = KvStore(bind, self._device, self._share)
            self.arena.clear()
        self._meter.add("stores", 1)
        return store

    def open_resharded_store(self, bind: BindRequest, given: int) -> KvStore:
        """Open a store whose layers are allocated later, in the allocated memory and ``given`` bytes of another store.
        The other store frees them meanwhile. Raises as KvStore.
        """
        with self._lock:
            self._had_store = True
            store = KvStore(bind, self._device, self._share, slabs=self.arena, given=self.arena.nbytes + given)
        self._meter.add("stores", 1)
        return store
