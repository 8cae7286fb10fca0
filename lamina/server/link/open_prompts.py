"""The open prompts of a server: who reads each one, what has been heard of it, and whether the engine has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lamina.request import Blame, Refusal

from .frames import UnsendableError, failed
from .messages import Cancel, Delta, Refused
from .reply_feed import ReplyFeed
from .restarts import Hearing

log = logging.getLogger(__name__)


class PromptRefusedError(Exception):
    """The engine has refused a prompt. ``blame``: who can put that right. ``refusal``: it would come too late."""

    def __init__(self, text: str, blame: Blame, refusal: Refusal | None = None) -> None:
        super().__init__(text)
        self.blame, self.refusal = blame, refusal


class DeltaWatch(Protocol):
    """Watches one prompt's deltas as they come in."""

    def grown(self, delta: Delta) -> None: ...


class DeltaRecords(Protocol):
    """Keeps what a step has brought, before readers get it."""

    def grown(self, deltas: Sequence[Delta]) -> None: ...


@dataclass(slots=True)
class OpenPrompt:
    """A prompt without its end. ``name``: its request's, for the log. ``sent``: whether the present engine has it."""

    feed: ReplyFeed
    meter: DeltaWatch
    hearing: Hearing
    name: str
    sent: bool = False


class OpenPrompts:
    """All prompts without their ends, by key. All methods belong to the event loop's thread."""

    def __init__(
        self, send: Callable[[msgspec.Struct], None], records: DeltaRecords | None, *, hears: bool = True
    ) -> None:
        """``send``: to the engine; raises UnsendableError. ``records``: gets all deltas first. ``hears``: whether
        another engine may have to go on with them.
        """
        self._send, self._records, self._hears = send, records, hears
        self._open: dict[int, OpenPrompt] = {}
        self._serving = False  # whether there is an engine to send to

    @property
    def keys(self) -> set[int]:
        """The keys of these prompts."""
        return {*self._open}

    @property
    def requests(self) -> int:
        """The number of requests that these prompts are of."""
        return len({id(each.feed) for each in self._open.values()})

    def add(self, key: int, prompt: OpenPrompt) -> None:
        """A new prompt goes to the engine now, or to the next one."""
        self._open[key] = prompt
        self._send_open(key)

    def cancel(self, key: int) -> None:
        """Forget a prompt, of which nobody wants anything any more. Unknown keys are ignored."""
        if (prompt := self._open.pop(key, None)) is not None and prompt.sent:
            self._send(Cancel(key))

    def resume(self) -> None:
        """An engine is there, and gets all of them."""
        self._serving = True
        for key in [*self._open]:
            self._send_open(key)

    def pause(self) -> None:
        """The engine is gone."""
        self._serving = False
        for prompt in self._open.values():
            prompt.sent = False

    def fail(self, error: Exception) -> None:
        """No engine will be there any more."""
        prompts, self._open = self._open, {}
        for prompt in prompts.values():
            prompt.feed.fail(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        """What a step has brought, or a request's end by an error."""
        if self._records is not None:
            self._records.grown(deltas)
        for delta in deltas:
            if prompt := self._open.get(delta.key):
                try:
                    self._deliver(prompt, delta)
                except Exception as e:  # a defect here, of this answer alone
                    log.exception("an answer to request %s cannot be handled", prompt.name)
                    self.cancel(delta.key)
                    text = f"the server cannot handle its answer: {type(e).__name__}: {e}"
                    prompt.feed.fail(PromptRefusedError(text, Blame.SERVER))

    def refuse(self, message: Refused) -> None:
        """The engine does not take a prompt."""
        if prompt := self._open.pop(message.key, None):
            prompt.feed.fail(PromptRefusedError(message.text, message.blame, message.refusal))

    def _send_open(self, key: int) -> None:
        prompt = self._open[key]
        if not self._serving or prompt.sent:
            return
        try:
            self._send(prompt.hearing.ask(key))
            prompt.sent = True
        except UnsendableError as e:
            log.error("a prompt of request %s cannot be sent to the engine: %s", prompt.name, e)
            self.take([failed(key, f"the request cannot be sent to the engine: {e}")])

    def _deliver(self, prompt: OpenPrompt, delta: Delta) -> None:
        if delta.times is not None:
            del self._open[delta.key]
        elif self._hears:
            prompt.hearing.take(delta)
        prompt.meter.grown(delta)
        prompt.feed.push(delta)
