"""The limits of the queue. A request above them is refused before it costs anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .errors import ApiError

RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60


class QueueTicket:
    """Places for the completions of one HTTP request. ``close`` releases the remaining ones. Idempotent."""

    def __init__(self, admission: QueueLimit, completions: int, tenant: bytes) -> None:
        self._admission, self._tenant = admission, tenant
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
        self._admission.release(1, self._tenant)

    def on_first_token(self, tokens: int) -> None:
        """Note that a prompt of ``tokens`` tokens has its first token and waits no more."""
        self._tokens -= tokens
        self._admission.tokens -= tokens

    def close(self) -> None:
        self._admission.release(self._completions, self._tenant)
        self._admission.tokens -= self._tokens
        self._completions = self._tokens = 0


class QueueLimit:
    """Counts running and waiting completions. One number bounds them: ``max_running`` decode, ``max_queued`` more may
    wait. Of several tenants each has a share that the others leave free: half of the queue, in equal parts.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        max_queued_tokens: int,
        refused: Callable[[str], None],
        num_tenants: int = 1,
    ) -> None:
        """``refused`` gets the reason of each refusal, as one word. ``num_tenants``: API keys, at least 1."""
        self._num_tenants, self._share = num_tenants, max_queued // (2 * num_tenants) if num_tenants > 1 else 0
        self._by_tenant = Counter[bytes]()  # completions
        self._max_running, self._limit = max_running, max_running + max_queued
        self._max_tokens = max_queued_tokens
        self._refused = refused
        self.completions = 0  # running and waiting ones
        self.tokens = 0  # tokens of prompts that wait for their first token
        self.is_draining = False  # True until the server ends
        self.is_closed = False  # set by the operator, for a time

    def check(self, completions: int, tenant: bytes = b"") -> None:
        """Check that ``completions`` more of ``tenant`` may enter. Raises ApiError: 503 while draining or closed, 429
        if the queue is full, 400 for a number that never fits.
        """
        if self.is_draining:
            self._refused("draining")
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S)
        if self.is_closed:
            self._refused("draining")
            raise ApiError(503, "the server takes no new requests now", code="draining", retry_after_s=RETRY_AFTER_S)
        most = self._limit - (self._num_tenants - 1) * self._share
        if completions > most:
            text = f"{completions} completions in one request; at most {most} fit (--max-num-queued-reqs)"
            raise ApiError(400, text, code="too_many_completions")
        if self.completions + completions > self._limit:
            what = f"{self._waiting} of at most {self._limit - self._max_running} completions"
            self._refuse("requests", what, "--max-num-queued-reqs")
        own = self._by_tenant[tenant] + completions
        if own > self._share and self.completions + completions + self._free_shares(tenant) > self._limit:
            self._refuse("requests", f"{own - completions} completions of this API key", "--max-num-queued-reqs")

    def admit(self, completions: int, tenant: bytes = b"") -> QueueTicket:
        """Take places; call it before any costly wait. Raises as ``check``."""
        self.check(completions, tenant)
        return self.readmit(completions, tenant)

    def readmit(self, completions: int, tenant: bytes = b"") -> QueueTicket:
        """Take places for a request that an earlier server accepted: it is not refused now."""
        self.completions += completions
        self._by_tenant[tenant] += completions
        return QueueTicket(self, completions, tenant)

    def release(self, completions: int, tenant: bytes) -> None:
        """Give places back."""
        self.completions -= completions
        self._by_tenant[tenant] -= completions
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def check_tokens(self, tokens: int) -> None:
        """Check that prompts with so many tokens may wait. Raises ApiError 429."""
        if self._max_tokens and self.tokens and self.tokens + tokens > self._max_tokens:
            what = f"{self.tokens} of at most {self._max_tokens} prompt tokens"
            self._refuse("tokens", what, "--limits queued-tokens=")

    def _free_shares(self, tenant: bytes) -> int:
        """Return the places of other tenants' shares that they do not use now."""
        used = sum(min(held, self._share) for other, held in self._by_tenant.items() if other != tenant)
        return max(0, (self._num_tenants - 1) * self._share - used)

    @property
    def _waiting(self) -> int:
        return max(0, self.completions - self._max_running)

    def _refuse(self, reason: str, what: str, flag: str) -> None:
        """``what``: the limit that is reached, set by ``flag``. Clients come later the more completions wait."""
        self._refused(reason)
        retry_s = min(RETRY_AFTER_S + self._waiting // self._max_running, MAX_RETRY_AFTER_S)
        text = f"too many requests are waiting: {what} ({flag}); retry in {retry_s} s"
        raise ApiError(429, text, code="overloaded", retry_after_s=retry_s)
