"""Sequences leave memory workers that are to go, one after the other, while all others decode."""

from __future__ import annotations

from collections.abc import Iterable

from .engine import Engine


class Exodus:
    """Of one change of the memory workers."""

    def __init__(self, engine: Engine, workers: Iterable[int]) -> None:
        """``workers``: those that are to go."""
        self._scheduler, going = engine.scheduler, set(workers)
        self._groups = {group for group, holders in enumerate(engine.info.holders) if going.intersection(holders)}
        self._closed = self._groups - engine.scheduler.closed  # by this; the others an operator has

    def begin(self) -> None:
        """Memory workers can copy to each other: no sequence begins there from now on, and those there leave."""
        self._scheduler.closed |= self._groups
        self._scheduler.moves.leaving |= self._groups

    def over(self) -> bool:
        """Whether all have left who can; what is left there moves as the view changes."""
        return self._scheduler.moves.is_over(self._scheduler.running)

    def undo(self) -> None:
        """They may stay, and others begin where they did."""
        self._scheduler.closed -= self._closed
        self._scheduler.moves.leaving -= self._groups

    def end(self) -> None:
        """They have gone: whoever takes their places is open."""
        self._scheduler.closed -= self._groups
        self._scheduler.moves.leaving -= self._groups
