"""The open prompts of a server: the reader of each, what it has received, and whether the engine has it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from lamina.executor.restart_budget import WINDOW_S
from lamina.facts.report import count_text
from lamina.request import ErrorOrigin, Refusal

from .engine_restarts import PromptProgress
from .frames import UnsendableError, failed
from .messages import CancelPrompt, Delta, PromptRefused
from .reply_queue import ReplyQueue
from .suspects import Suspects

log = logging.getLogger(__name__)
MOST_REFUSED = 1024  # requests that are remembered
MOST_UNREAD = 16  # tokens of a completion that its reader may leave for GRACE_S; then the prompt is set aside
GRACE_S = 0.05  # a reader whose client reads takes some in this time, however busy this process is
GUILTY = "two engines have failed while they computed this request, so it is refused: the server's log has the defect"


class PromptRefusedError(Exception):
    """The engine has refused a prompt. ``blame``: where the error lies. ``refusal``: set if it would come too late."""

    def __init__(self, text: str, blame: ErrorOrigin, refusal: Refusal | None = None) -> None:
        super().__init__(text)
        self.blame, self.refusal = blame, refusal


class DeltaObserver(Protocol):
    """Watches one prompt's deltas as they come in."""

    def on_delta(self, delta: Delta) -> None: ...


class DeltaSink(Protocol):
    """Keeps the results of a step before readers get them."""

    def add_deltas(self, deltas: Sequence[Delta]) -> None: ...


@dataclass(slots=True)
class OpenPrompt:
    """A prompt that has not ended. ``name``: its request's name in the log. ``sent_as``: its key in the present engine;
    None: that engine does not have it. ``is_watched``: whether its reader gets ``GRACE_S``. ``is_aside``: its reader
    does not read, so no engine computes it until that reader goes on.
    """

    replies: ReplyQueue
    meter: DeltaObserver
    progress: PromptProgress
    name: str
    sent_as: int | None = None
    is_watched: bool = False
    is_aside: bool = False


class OpenPrompts:
    """All prompts that have not ended, by key. All methods belong to the event loop's thread."""

    def __init__(self, send: Callable[[msgspec.Struct], None], records: DeltaSink | None) -> None:
        """``send``: sends a message to the engine; raises UnsendableError. ``records``: gets all deltas first."""
        self._send, self._records = send, records
        self._open: dict[int, OpenPrompt] = {}
        self._sent: dict[int, int] = {}  # key in the present engine -> key
        self._withdrawn = set[int]()  # keys that the present engine knows and must not get again
        self._next_alias = -1  # the next key for such a prompt
        self._serving = False  # whether there is an engine to send to
        self._suspects = Suspects()
        self._refused: OrderedDict[bytes, float] = OrderedDict()  # digest -> when it was found guilty
        self.some_ended = False  # whether a prompt has finished since the last one was found guilty

    @property
    def keys(self) -> set[int]:
        """The keys of all open prompts."""
        return {*self._open}

    @property
    def requests(self) -> int:
        """The number of requests to which the open prompts belong."""
        return len({id(each.replies) for each in self._open.values()})

    def add(self, key: int, prompt: OpenPrompt) -> None:
        """Send a new prompt to this engine or the next one. It is refused if an equal prompt was found guilty."""
        if self._is_refused(prompt):
            log.error("request %s is refused: another one of the same prompt has made engines fail", prompt.name)
            prompt.replies.fail(PromptRefusedError(GUILTY, ErrorOrigin.SERVER))
            return
        self._open[key] = prompt
        self._offer(key)

    def cancel(self, key: int) -> None:
        """Forget a prompt. Unknown keys are ignored."""
        if key in self._open:
            self._withdraw(key)
            del self._open[key]
            self._ended(key)

    def resume(self) -> None:
        """Note that an engine is ready. It gets all prompts or, during a search for the guilty one, only the one on
        trial.
        """
        self._serving = True
        self._suspects.started()
        self._arrange()

    def pause(self, *, by_defect: bool = False, at_once: int = 0) -> bool:
        """Note that the engine is gone. ``by_defect``: it failed while it computed at most ``at_once`` prompts. Returns
        True if the prompt that made it fail is known; that prompt has ended by an error.
        """
        had, self._serving = self._likeliest(at_once), False
        self._sent.clear()
        self._withdrawn.clear()
        for prompt in self._open.values():
            prompt.sent_as = None
        if not by_defect or not had:
            return False
        if (guilty := self._suspects.failed(had)) is None:
            log.warning(
                "the engine failed with %s: they are tried one by one; the rest wait", count_text(len(had), "prompt")
            )
            return False
        self._convict(guilty)
        return True

    def _likeliest(self, at_once: int) -> list[int]:
        """Return the prompts that the engine may have computed: the first ``at_once`` of those without a token, then
        the rest.
        """
        sent = {key: prompt.progress for key, prompt in self._open.items() if prompt.sent_as is not None}
        new = sorted((progress.priority, key) for key, progress in sent.items() if not progress.begun)
        return [key for _, key in new[:at_once]] + sorted((k for k, x in sent.items() if x.begun), reverse=True)

    def _convict(self, guilty: int) -> None:
        """End this prompt and all equal ones by an error, and refuse them from now on."""
        digest = self._open[guilty].progress.digest
        self._refused[digest] = time.monotonic()
        while len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)
        for key in [key for key, prompt in self._open.items() if prompt.progress.digest == digest]:
            name = self._open[key].name
            log.error("request %s is refused for %.0f s: two engines have failed with it", name, WINDOW_S)
            self._pass_on([failed(key, GUILTY)])

    def _is_refused(self, prompt: OpenPrompt) -> bool:
        if not self._refused:  # computing the digest of a long prompt takes time
            return False
        at = self._refused.get(prompt.progress.digest)
        return at is not None and time.monotonic() - at < WINDOW_S

    def fail(self, error: Exception) -> None:
        """End all prompts by ``error``: there is no engine any more."""
        prompts, self._open = self._open, {}
        for prompt in prompts.values():
            prompt.replies.fail(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        """Pass on the results of a step, under the keys that the engine knows."""
        known = [delta for delta in deltas if delta.key in self._sent]  # the rest belong to withdrawn prompts
        for delta in known:
            delta.key = self._sent[delta.key]
        self._pass_on(known)

    def _pass_on(self, deltas: Sequence[Delta]) -> None:
        """Pass deltas to the journal and to readers: the results of a step, or the end of a request by an error."""
        if self._records is not None:
            self._records.add_deltas(deltas)
        for delta in deltas:
            if prompt := self._open.get(delta.key):
                try:
                    self._deliver(prompt, delta)
                except Exception as e:  # a defect here, of this reply alone
                    log.exception("a reply to request %s cannot be handled", prompt.name)
                    self.cancel(delta.key)
                    text = f"the server cannot handle its reply: {type(e).__name__}: {e}"
                    prompt.replies.fail(PromptRefusedError(text, ErrorOrigin.SERVER))

    def refuse(self, message: PromptRefused) -> None:
        """Handle the engine's refusal of a prompt."""
        key = self._sent.pop(message.key, None)
        if key is not None and (prompt := self._open.pop(key, None)):
            prompt.replies.fail(PromptRefusedError(message.text, message.blame, message.refusal))
            self._ended(key)

    def _arrange(self) -> None:
        """Make the engine have all prompts that it may have now, and no more."""
        for key in [*self._open]:
            if not self._suspects.may_go(key):
                self._withdraw(key)
        for key in [*self._open]:
            self._offer(key)

    def _offer(self, key: int) -> None:
        """Send a prompt, if it is open, not sent yet, and may go."""
        prompt = self._open.get(key)
        if prompt is None or prompt.sent_as is not None or not self._serving or not self._suspects.may_go(key):
            return
        if prompt.is_aside:
            return
        sent_as = key
        if key in self._withdrawn:  # replies to the withdrawn key may still come
            sent_as, self._next_alias = self._next_alias, self._next_alias - 1
        try:
            self._send(prompt.progress.request_message(sent_as))
            prompt.sent_as, self._sent[sent_as] = sent_as, key
        except UnsendableError as e:
            log.error("a prompt of request %s cannot be sent to the engine: %s", prompt.name, e)
            self._pass_on([failed(key, f"the request cannot be sent to the engine: {e}")])

    def _withdraw(self, key: int) -> None:
        """Cancel a prompt in the engine; its replies that are still on their way are ignored."""
        prompt = self._open[key]
        if prompt.sent_as is not None:
            self._send(CancelPrompt(prompt.sent_as))
            del self._sent[prompt.sent_as]
            prompt.sent_as = None
            self._withdrawn.add(key)

    def _deliver(self, prompt: OpenPrompt, delta: Delta) -> None:
        key, whole = delta.key, delta.times is not None
        if whole:
            del self._open[key]
            if prompt.sent_as is not None:
                del self._sent[prompt.sent_as]
        else:
            prompt.progress.take(delta)
        prompt.meter.on_delta(delta)
        prompt.replies.push(delta)
        if not whole and not prompt.is_watched and prompt.replies.unread(key) >= MOST_UNREAD:
            prompt.is_watched = True
            asyncio.get_running_loop().call_later(GRACE_S, self._set_aside, key, prompt.replies.num_taken)
        if whole:
            self.some_ended = self.some_ended or delta.finish_reason in ("stop", "length")
            self._ended(key)
        elif self._suspects.grown(key, len(delta.token_ids) / prompt.progress.completions):
            self._rearrange()

    def _set_aside(self, key: int, taken: int) -> None:
        """Withdraw a prompt whose reader has not read since ``taken``, so that it costs others no time, place or KV."""
        if (prompt := self._open.get(key)) is None:
            return
        prompt.is_watched = False
        if prompt.sent_as is not None and prompt.replies.num_taken == taken and not self._suspects.searching:
            self._withdraw(key)
            prompt.is_aside = True
            prompt.replies.call_when_taken(partial(self._go_on, key))

    def _go_on(self, key: int) -> None:
        """Continue a prompt from its tokens so far, as its reader has taken them."""
        if (prompt := self._open.get(key)) is not None:
            prompt.is_aside = False
            self._offer(key)

    def _ended(self, key: int) -> None:
        self._withdrawn.discard(key)
        if self._suspects.ended(key):
            self._rearrange()

    def _rearrange(self) -> None:
        """Arrange prompts anew, after a suspect was cleared or has ended."""
        if not self._suspects.searching:
            log.warning("no prompt makes the engine fail alone: all continue together")
        self._arrange()
