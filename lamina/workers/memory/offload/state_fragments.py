"""Versions of recurrent states as fragments, read from a memory worker's slots and written back to them.

A fragment is the state of some heads of one recurrent layer, in fp32: of one head, or of a run of channels if the layer
is a convolution alone. It does not depend on slots, nor on the numbers of ranks and memory workers, since these have
whole runs, unless there are more of them than runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.kv.pages import PAGE, PageFragment
from lamina.ops.recurrence.parts import Part
from lamina.ops.recurrence.spec import MAX_RUN
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import LoadKv, RowRange
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.memory.state_store import StateStore


class StateSlot(NamedTuple):
    """The slot of a version of a sequence's states after ``length`` tokens; None if other workers have it."""

    slot: int | None
    length: int

    @property
    def page(self) -> int:
        """The number of the page with which these tokens end."""
        return (self.length - 1) // PAGE

    @property
    def tokens(self) -> int:
        """The tokens of that page."""
        return self.length - self.page * PAGE


class StateFragments:
    """The fragments of a store's states. ``store``: None if no states are here. ``first_layer``: the number of the
    first recurrent layer, after all attention layers. ``rank``: of those that divide its heads equally.
    """

    def __init__(self, store: StateStore | None, first_layer: int, rank: int = 0) -> None:
        self._store = store
        self._parts = dict(self._parts_of(store, first_layer, rank)) if store is not None else {}
        self.whole = frozenset(self._parts)  # the fragments of a version that lies here
        self.nbytes_of_version = sum(part.spec.state_bytes for _, part in self._parts.values())

    @staticmethod
    def _parts_of(store: StateStore, first_layer: int, rank: int) -> Iterator[tuple[PageFragment, tuple[int, Part]]]:
        """Yield each fragment with its recurrent layer, and its part of what the worker has of that layer."""
        for number, piece in enumerate(store.pieces):
            if piece is None:
                continue
            first = rank * piece.part.whole.heads + piece.part.first  # of the model's layer, as ``low`` and ``high``
            for low, high in _runs(piece.spec.run, first, first + piece.spec.heads):
                name = PageFragment(first_layer + number, low * MAX_RUN + high - low - 1)
                yield name, (number, Part.of(piece.spec, low - first, high - low))

    def locate(self, sequence: int, length: int, location: KvLocation) -> StateSlot | None:
        """Return the slot of a complete version; None if it should be here, and is not."""
        if self._store is None or not self._store.versions.is_here(RowRange(sequence, length, 0, location)):
            return StateSlot(None, length)
        slot = self._store.versions.slot_of(sequence, length)
        return None if slot is None else StateSlot(slot, length)

    def slot_to_fill(self, op: LoadKv) -> StateSlot:
        """Return the slot that a load of an applied plan is to fill."""
        return StateSlot(None if self._store is None else self._store.versions.slot_to_fill(op.rows), op.first)

    def is_still_at(self, sequence: int, at: StateSlot) -> bool:
        """Return whether a sequence still has its version at a slot."""
        return self._store is None or self._store.versions.slot_of(sequence, at.length) == at.slot

    def nbytes(self, at: StateSlot) -> int:
        """Return the bytes of the fragments that are here."""
        return self.nbytes_of_version if at.slot is not None else 0

    def read(self, at: StateSlot) -> dict[PageFragment, memoryview]:
        """Return a copy of the fragments that are here."""
        copy = StateCopy(self, at)
        copy.run()
        return copy.fragments

    def read_fragment(self, fragment: PageFragment, at: StateSlot) -> memoryview:
        """Return a copy of one fragment."""
        data = memoryview(bytearray(self._parts[fragment][1].spec.state_bytes))
        part, state, message = self._views(fragment, at, data)
        message.copy_(part.take_state(state))
        return data

    def names(self, at: StateSlot) -> list[PageFragment]:
        """Return the names of the fragments that are here."""
        return [*self._parts] if at.slot is not None else []

    def buffers(self, at: StateSlot) -> dict[PageFragment, memoryview]:
        """Return buffers for the fragments that are here."""
        return {name: memoryview(bytearray(self._parts[name][1].spec.state_bytes)) for name in self.names(at)}

    def write(self, at: StateSlot, fragments: Mapping[PageFragment, memoryview]) -> None:
        """Write ``fragments``, filled buffers of ``buffers``, to the slot."""
        for fragment, data in fragments.items():
            part, state, message = self._views(fragment, at, data)
            part.put_state(message, state)

    def _views(self, fragment: PageFragment, at: StateSlot, data: memoryview) -> tuple[Part, Tensor, Tensor]:
        number, part = self._parts[fragment]
        assert self._store is not None
        _, _, states = self._store.states_of(number)
        return part, states[at.slot], tensor_over(data, torch.float32)


class StateCopy:
    """A copy of a version, which the thread of saves makes fragment by fragment. If its slot is given up meanwhile, the
    thread that serves rounds copies the rest.
    """

    def __init__(self, states: StateFragments, at: StateSlot) -> None:
        self._states, self._at, self._names = states, at, states.names(at)
        self._left, self._copied = deque(self._names), dict[PageFragment, memoryview]()
        self._is_copying = threading.Lock()

    @property
    def fragments(self) -> dict[PageFragment, memoryview]:
        """The fragments, once all are copied."""
        return {name: self._copied[name] for name in self._names}

    def run(self) -> None:
        """Copy fragments until none is left for this thread. Another thread may still copy what it has taken over."""
        while self._left:
            with self._is_copying:
                self._copy_next()

    def take_over(self) -> None:
        """Copy all fragments that are left, and wait for the one that ``run`` copies in another thread."""
        while self._left:
            self._copy_next()
        with self._is_copying:
            pass

    def _copy_next(self) -> None:
        try:
            fragment = self._left.popleft()
        except IndexError:  # the other thread was faster
            return
        self._copied[fragment] = self._states.read_fragment(fragment, self._at)

    def stop(self) -> None:
        """Let ``run`` copy no more fragments."""
        self._left.clear()


def _runs(size: int, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of heads that make fragments, of ``size`` heads. They are the same for all cuts of the layer,
    unless it is cut within a run: then other workers do not find these states.
    """
    while first < stop:
        high = min(stop, (first // size + 1) * size)
        yield first, high
        first = high
