"""Memory that is taken before a store needs it, and the stores that are made in it: never a second one beside it."""

from __future__ import annotations

import logging
import threading
from itertools import chain

import torch

from lamina.facts.room import too_little
from lamina.kv.slabs import HUGE_PAGE, Slabs, touch
from lamina.protocol.plan import Bind
from lamina.protocol.tiers import TierPlace
from lamina.workers.devices import CPU

from .meter import Meter
from .pages.room import room_of
from .store import Store, available_bytes, shapes_by_layer

log = logging.getLogger(__name__)


class StoreRoom:
    """Of one memory worker. ``prepare`` is safe from any thread; all else is for the thread that serves."""

    def __init__(self, device: torch.device, share: float, meter: Meter) -> None:
        """``share``: see Store."""
        self.slabs = Slabs()  # for the layers of the next one
        self._device, self._share, self._meter = device, share, meter
        self._lock = threading.Lock()
        self._has_had = False  # a store

    def prepare(self, bind: Bind | None, tier: TierPlace | None, store: Store | None, *, ahead: bool) -> None:
        """Take memory for the store of ``bind``: for all of it, or where there is a ``store``, which gives up its own
        layer by layer, for one layer of each form. ``ahead``: for the first one; nothing happens where there has been
        one. None: what was taken goes back. Raises as Store, and as room_of for ``tier``.
        """
        with self._lock:
            if ahead and self._has_had:
                return
            self.slabs.clear()
            if bind is None:
                return
            if tier is not None:
                room_of(tier, bind, bind.kv_bytes)
            if ahead and bind.kv_bytes > (free := available_bytes(self._device)):
                raise ValueError(too_little(bind.kv_bytes, free))
            layers = shapes_by_layer(bind) if self._device == CPU else []
            for shapes in layers if store is None else dict.fromkeys(map(tuple, layers)):
                self.slabs.prepare(shapes, HUGE_PAGE if ahead else 0)  # another place may have a little more

    def open(self, bind: Bind) -> Store:
        """A store where there is none, in memory that was made ready if it does for all of it; else that goes back
        first, as both may not fit. Raises as Store.
        """
        with self._lock:  # what is being made ready is ready before
            self._has_had, given = True, self.slabs.nbytes
            if given and self.slabs.serves(chain(*shapes_by_layer(bind))):
                store = Store(bind, self._device, self._share, slabs=self.slabs, given=given)
                for _ in bind.layers:
                    touch(x for piece in store.grow() for x in piece.kv.tensors)  # pages are there, but for a few
            else:
                if given:
                    log.warning("%d bytes of memory were made ready for a store of another size: they go back", given)
                self.slabs.clear()
                store = Store(bind, self._device, self._share)
            self.slabs.clear()
        self._meter.add("stores", 1)
        return store

    def recut(self, bind: Bind, given: int) -> Store:
        """A store whose layers are still to be made, in memory that was made ready, and in ``given`` bytes of another
        store that become free meanwhile. Raises as Store.
        """
        with self._lock:
            self._has_had = True
            store = Store(bind, self._device, self._share, slabs=self.slabs, given=self.slabs.nbytes + given)
        self._meter.add("stores", 1)
        return store
