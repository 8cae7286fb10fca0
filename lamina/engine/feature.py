"""The seam between the engine's loop and its features: the hooks, and when the loop calls them.

SLO admission, the choice of the number of batches, and loans are features: objects in one table, called in its order.
Features of the scheduler have their own seam (`lamina.scheduler.feature`).
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

    def between_rounds(self, engine: Engine) -> None:
        """A round was scheduled, or an engine without work checks its workers. No result is being processed."""

    def on_idle(self, engine: Engine) -> str | None:
        """Nothing is in flight, and the first waiting request has no KV blocks.

        Returns why it will never have them, "" if this feature may still bring some, else None.
        """
        return None

    def on_arrival(self, sequences: Several[Sequence], *, accepted: bool) -> None:
        """A request with these sequences will be queued. Raises OverloadedError to refuse it.

        ``accepted``: an earlier engine has admitted it.
        """

    def on_first_rows(self, sequence: Sequence) -> None:
        """The first rows of a sequence are sent to the compute workers."""

    def on_first_token(self, sequence: Sequence) -> Refusal | None:
        """A request has its first token, in ``sequence``. Returns the reason to reject it; None to decode on."""
        return None

    def on_round_done(self, done: Round) -> None:
        """The last step of a round has completed, and its tokens are appended."""
