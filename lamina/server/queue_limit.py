"""The limits of the queue. A request above them is refused before it costs anything."""

from __future__ import annotations

from collections.abc import Callable

from .errors import ApiError

RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60


class QueueTicket:
    """Places for the completions of one HTTP request. ``close`` releases the remaining ones. Idempotent."""

    def __init__(self, admission: QueueLimit, completions: int) -> None:
        self._admission = admission
        self._completions = completions
        self._tokens = 0

    def set_prompt_tokens(self, tokens: int) -> None:
        """Count the tokens of the prompts. Raises ApiError if no more may wait; prompts that alone exceed the limit may
        wait alone.
        """
        self._admission.check_tokens(tokens)
        self._tokens += tokens
        self._admission.tokens += tokens

    def on_completion_finished(self) -> None:
        """Release the place of a completion that has ended."""
        self._completions -= 1
        self._admission.completions -= 1

    def on_first_token(self, tokens: int) -> None:
        """Note that a prompt of ``tokens`` tokens has its first token and waits no more."""
        self._tokens -= tokens
        self._admission.tokens -= tokens

    def close(self) -> None:
        self._admission.completions -= self._completions
        self._admission.tokens -= self._tokens
        self._completions = self._tokens = 0


class QueueLimit:
    """Counts running and waiting completions. One number bounds them: ``max_running`` decode, ``max_queued`` more may
    wait.
    """

    def __init__(
        self, max_running: int, max_queued: int, max_queued_tokens: int, refused: Callable[[str], None]
    ) -> None:
        """``refused`` gets the reason of each refusal, as one word."""
        self._max_running, self._limit = max_running, max_running + max_queued
        self._max_tokens = max_queued_tokens
        self._refused = refused
        self.completions = 0  # running and waiting ones
        self.tokens = 0  # tokens of prompts that wait for their first token
        self.is_draining = False  # True until the server ends
        self.is_closed = False  # set by the operator, for a time

    def check(self, completions: int) -> None:
        """Check that ``completions`` more may enter. Raises ApiError: 503 while draining or closed, 429 if the queue is
        full, 400 for a number that never fits.
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
            what = f"{self._waiting} of at most {self._limit - self._max_running} completions"
            self._refuse("requests", what, "--max-num-queued-reqs")

    def admit(self, completions: int) -> QueueTicket:
        """Take places; call it before any costly wait. Raises as ``check``."""
        self.check(completions)
        self.completions += completions
        return QueueTicket(self, completions)

    def readmit(self, completions: int) -> QueueTicket:
        """Take places for a request that an earlier server accepted: it is not refused now."""
        self.completions += completions
        return QueueTicket(self, completions)

    def check_tokens(self, tokens: int) -> None:
        """Check that prompts with so many tokens may wait. Raises ApiError 429."""
        if self._max_tokens and self.tokens and self.tokens + tokens > self._max_tokens:
            what = f"{self.tokens} of at most {self._max_tokens} prompt tokens"
            self._refuse("tokens", what, "--max-num-queued-tokens")

    @property
    def _waiting(self) -> int:
        return max(0, self.completions - self._max_running)

    def _refuse(self, reason: str, what: str, flag: str) -> None:
        """``what``: the limit that is reached, set by ``flag``. Clients come later the more completions wait."""
        self._refused(reason)
        retry_s = min(RETRY_AFTER_S + self._waiting // self._max_running, MAX_RETRY_AFTER_S)
        text = f"too many requests are waiting: {what} ({flag}); retry in {retry_s} s"
        raise ApiError(429, text, code="overloaded", retry_after_s=retry_s)
