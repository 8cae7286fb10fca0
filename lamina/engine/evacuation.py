"""Evacuation: sequences leave memory workers that will be removed, one by one, while all others decode."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.scheduler.kv_manager.migration import KvMigration

from .engine import Engine


def evacuation_of(engine: Engine, workers: Iterable[int]) -> Evacuation | None:
    """Return the evacuation of ``workers``; None if their sequences can only move between epochs."""
    migrates = engine.config.migrates_sequences and engine.scheduler.features.get(KvMigration) is not None
    return Evacuation(engine, going) if (going := [*workers]) and migrates else None


class Evacuation:
    """The evacuation before one change of the memory workers."""

    def __init__(self, engine: Engine, workers: Iterable[int]) -> None:
        """``workers``: those that will be removed."""
        self._scheduler, going = engine.scheduler, set(workers)
        self._migration = engine.scheduler.features[KvMigration]
        self._groups = {
            group for group, holders in enumerate(engine.worker_info.holders) if going.intersection(holders)
        }
        self._closed = self._groups - engine.scheduler.cordoned  # the rest was cordoned by an operator

    def begin(self) -> None:
        """Cordon the workers and start to move their sequences. The memory workers must be connected."""
        self._scheduler.cordon(self._groups)
        self._migration.close(self._groups)

    def is_done(self) -> bool:
        """True once every sequence has left that can. The rest moves when the epoch changes."""
        return self._migration.is_drained(self._scheduler.running)

    def cancel(self) -> None:
        """Undo ``begin``: sequences stay, and new ones may begin there."""
        self._scheduler.uncordon(self._closed)
        self._migration.reopen(self._groups)

    def finish(self) -> None:
        """Open the places of the removed workers for those that take them."""
        self._scheduler.uncordon(self._groups)
        self._migration.reopen(self._groups)
