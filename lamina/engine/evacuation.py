"""Sequences leave memory workers that are to go, one after the other, while all others decode."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.scheduler.kv_manager.migration import KvMigration

from .engine import Engine


class Evacuation:
    """Of one change of the memory workers."""

    def __init__(self, engine: Engine, workers: Iterable[int]) -> None:
        """``workers``: those that are to go."""
        self._scheduler, going = engine.scheduler, set(workers)
        self._migration = engine.scheduler.features[KvMigration]
        self._groups = {
            group for group, holders in enumerate(engine.worker_info.holders) if going.intersection(holders)
        }
        self._closed = self._groups - engine.scheduler.cordoned  # by this; the others an operator has

    def begin(self) -> None:
        """Memory workers can copy to each other: no sequence begins there from now on, and those there leave."""
        self._scheduler.cordon(self._groups)
        self._migration.close(self._groups)

    def is_done(self) -> bool:
        """Whether all have left who can; what is left there moves as the epoch changes."""
        return self._migration.is_drained(self._scheduler.running)

    def cancel(self) -> None:
        """They may stay, and others begin where they did."""
        self._scheduler.uncordon(self._closed)
        self._migration.reopen(self._groups)

    def finish(self) -> None:
        """They have gone: whoever takes their places is open."""
        self._scheduler.uncordon(self._groups)
        self._migration.reopen(self._groups)
