"""The limits of the waiting line. A request above them is refused before it costs anything."""

from __future__ import annotations

from collections.abc import Callable

from .errors import ApiError

RETRY_AFTER_S = 1


class QueueTicket:
    """Room for the completions of one HTTP request. ``close`` gives back what is left of it. Idempotent."""

    def __init__(self, admission: QueueLimit, completions: int) -> None:
        self._admission = admission
        self._completions = completions
        self._tokens = 0

    def set_prompt_tokens(self, tokens: int) -> None:
        """The prompts have so many tokens. Raises ApiError where no more may wait; prompts that alone are above the
        limit may wait alone.
        """
        self._admission.check_tokens(tokens)
        self._tokens += tokens
        self._admission.tokens += tokens

    def on_completion_finished(self) -> None:
        """One of its completions has ended."""
        self._completions -= 1
        self._admission.completions -= 1

    def on_first_token(self, tokens: int) -> None:
        """A prompt of so many tokens has its first token."""
        self._tokens -= tokens
        self._admission.tokens -= tokens

    def close(self) -> None:
        self._admission.completions -= self._completions
        self._admission.tokens -= self._tokens
        self._completions = self._tokens = 0


class QueueLimit:
    """Counts what is under way. One number bounds it: so many completions decode, so many more may wait."""

    def __init__(
        self, max_running: int, max_queued: int, max_queued_tokens: int, refused: Callable[[str], None]
    ) -> None:
        """``refused`` gets the reason of each refusal, as one word."""
        self._limit = max_running + max_queued
        self._max_running = max_running
        self._max_tokens = max_queued_tokens
        self._refused = refused
        self.completions = 0  # under way
        self.tokens = 0  # of prompts that wait for their first token
        self.is_draining = False  # until the server's end
        self.is_closed = False  # by the operator, for a time

    @property
    def num_waiting(self) -> int:
        """Completions above those that can decode."""
        return max(0, self.completions - self._max_running)

    def check(self, completions: int) -> None:
        """Check that so many more may come in. Raises ApiError: 503 while draining or closed, 429, 400 for what
        never could.
        """
        if self.is_draining:
            self._refused("draining")
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)
        if self.is_closed:
            self._refused("draining")
            raise ApiError(503, "the server takes no new requests now", code="draining", retry_after_s=RETRY_AFTER_S)
        if completions > self._limit:
            text = f"{completions} completions in one request; at most {self._limit} fit (--max-num-queued-reqs)"
            raise ApiError(400, text, code="too_many_completions")
        if self.completions + completions > self._limit:
            self._refuse("requests")

    def admit(self, completions: int) -> QueueTicket:
        """Take room, before anything is awaited that costs something. Raises like ``check``."""
        self.check(completions)
        self.completions += completions
        return QueueTicket(self, completions)

    def readmit(self, completions: int) -> QueueTicket:
        """Room for what was accepted by an earlier server: it is not refused now."""
        self.completions += completions
        return QueueTicket(self, completions)

    def check_tokens(self, tokens: int) -> None:
        """Check that prompts of so many tokens may wait. Raises ApiError 429."""
        if self._max_tokens and self.tokens and self.tokens + tokens > self._max_tokens:
            self._refuse("tokens")

    def _refuse(self, reason: str) -> None:
        self._refused(reason)
        raise ApiError(429, "too many requests are waiting", code="overloaded", retry_after_s=RETRY_AFTER_S)
