"""The seam between the engine's loop and its features: the hooks, and when the loop calls them.

SLO admission and loans are features: objects in one table, called in its order. Features of the scheduler have their
own seam (`lamina.scheduler.feature`).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

from lamina.request import Refusal
from lamina.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine


class EngineFeature:
    """A feature of the engine. Each hook does nothing here."""

    def between_rounds(self, engine: Engine) -> None:
        """A round was scheduled, or an engine without work checks its workers. No result is being processed."""

    def on_idle(self, engine: Engine) -> str | None:
        """Nothing is in flight, and the first waiting request has no KV blocks. Only loans answer. It is a hook, as the
        engine imports nothing of loans.

        Returns why it will never have them, "" if this feature may still bring some, else None.
        """
        return None

    def refusal(self, sequences: Several[Sequence], *, has_token: bool) -> Refusal | None:
        """A request with these sequences will be queued, or has its first token, in the only one of ``sequences``. One
        that an earlier engine has accepted is not asked about.

        Returns the reason to reject it; None: it goes on.
        """
        return None
