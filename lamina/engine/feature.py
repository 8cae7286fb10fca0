"""The seam between the engine's loop and what is not the loop: what each feature may do, and when it is asked.

The loop schedules, runs and takes. Admission by SLO, the choice of a number of batches, and loans are features: objects
in one table, asked in its order. Features of the scheduler have a seam of their own (`lamina.scheduler.feature`).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

from lamina.request import Refusal
from lamina.scheduler.scheduler_output import Round
from lamina.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine


class EngineFeature:
    """A feature of the engine. Each hook does nothing here."""

    def after_schedule(self, engine: Engine) -> None:
        """A pass of the loop has planned its round, so a request that begins in it does not wait any more. Or an engine
        without work looks at its workers. No step's result is being read.
        """

    def on_idle(self, engine: Engine) -> str | None:
        """Nothing is in flight, and the first waiting request has no room. Returns why it never will; "" while room
        may still come; None if this feature brings none.
        """
        return None

    def on_arrival(self, sequences: Several[Sequence], *, accepted: bool) -> None:
        """A request of these sequences is about to be queued. ``accepted``: an earlier engine has accepted it. Raises
        OverloadedError to refuse it.
        """

    def on_first_rows(self, sequence: Sequence) -> None:
        """The first rows of a sequence go to the compute workers."""

    def on_first_token(self, sequence: Sequence) -> Refusal | None:
        """A request has its first token, of ``sequence``. Returns why it is not decoded further; None if it is."""
        return None

    def on_round_done(self, done: Round) -> None:
        """The last step of a round is done, and its tokens have been appended."""
