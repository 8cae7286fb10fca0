"""One HTTP request in the engine: its prompts, their deltas, the room that they take, and its end in any case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lamina.engine.conversations.sessions import SessionName
from lamina.engine.conversations.terms import PLAIN, KVTerms
from lamina.engine.conversations.turns import Turns
from lamina.facts.room import memory_bytes
from lamina.request import SamplingParams

from .admission import Admission, Ticket
from .answer.heads import usage_of
from .answer.logprobs import TokenNumbers, TokenTexts
from .config import ServerConfig
from .door.budget import MemoryBudget
from .errors import ApiError, engine_error, too_late
from .journal.entry import Entry
from .journal.journal import Journal
from .journal.records import Accepted
from .link.client import EngineClient, EngineGoneError
from .link.messages import Delta
from .link.open_prompts import PromptRefusedError
from .link.reply_feed import ReplyFeed
from .request.params import PARAMS
from .request.prompts import Prompt, Prompter
from .request.unsupported import UnknownFields
from .watch.gauges import EngineGauges
from .watch.metrics import Metrics, PromptMeter

RECOVERING = "recovering"  # a worker was lost and is being replaced; its requests go on behind that
DRAINING = "draining"  # by the operator, who may undo it


@dataclass(frozen=True)
class SessionTurn:
    """A turn of a session that is under way."""

    turns: Turns
    name: SessionName


@dataclass
class Service:
    """Everything that the routes share: one for each server, filled by ``run.py``."""

    config: ServerConfig
    names: list[str]
    root: str
    client: EngineClient
    prompter: Prompter
    texts: TokenTexts
    metrics: Metrics
    gauges: EngineGauges
    admission: Admission
    fields: UnknownFields
    defaults: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, as the model's own files have them
    journal: Journal | None = None
    turns: Turns = field(default_factory=Turns)
    decoder: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lamina-bodies"))
    encoder: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lamina-answers"))
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a body on ``decoder``
    tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a long text
    calls: set[Call] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        limits = self.config.memory_limits(memory_bytes())
        self.bodies, self.answers = MemoryBudget(limits.body_total), MemoryBudget(limits.answer_total)

    def texts_of(self, asked: Accepted) -> TokenTexts:
        """By which tokens are named in its log-probabilities."""
        return TokenNumbers(self.texts.tokenizer) if asked.tokens_as_ids else self.texts

    @property
    def illness(self) -> str | None:
        """Why this server should get no requests; None if it should."""
        if self.admission.draining:
            return "shutting down"
        if self.admission.closed:
            return DRAINING
        if self.client.failure is not None:
            return self.client.failure
        if self.client.state is not None and self.client.state.recovering:
            return RECOVERING
        if self.client.silence_s > self.config.health_timeout_s:
            return f"the engine has made no progress for {self.client.silence_s:.1f} s"
        return None

    def check_model(self, name: str | None) -> str:
        """The name that the client used, or the first one. Raises ApiError 404."""
        if name is not None and name not in self.names:
            text = f"the model {name[:128]!r} does not exist; this server has {self.names[0]!r}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return name or self.names[0]


class Call:
    """Iterate over it for (number of the prompt, delta) until everything has ended; then, or earlier, close it."""

    def __init__(
        self,
        service: Service,
        prompts: list[Prompt],
        params: SamplingParams,
        ticket: Ticket,
        arrival_s: float,
        *,
        only_prompt: bool = False,
        terms: KVTerms = PLAIN,
        entry: Entry | None = None,
        turn: SessionTurn | None = None,
        answer_id: str = "",
    ) -> None:
        """``ticket``: for all completions, which the call closes; ``only_prompt``: the one token that is drawn all the
        same is not wanted; ``entry``: of the journal, where there is one; ``turn``: of its session, which
        ends with the call; ``answer_id``: as far as the log tells it. Raises ApiError where there is no room for so
        many tokens, and where there is no engine.
        """
        self.prompts = prompts
        self.params = params
        self.only_prompt = only_prompt
        self.answer_id = answer_id
        self.completion_tokens = 0
        self.cached_tokens = 0  # of the prompts
        self._service, self._entry, self._terms, self._turn = service, entry, terms, turn
        self._answered = True  # as far as it has ended
        self._carried = False  # to the next server of the journal
        self._feed = ReplyFeed()
        self._open = len(prompts) * params.n
        self._waiting: set[int] = set()  # keys without a first token
        self._numbers: dict[int, int] = {}
        if service.client.failure is not None:
            raise ApiError(503, f"the engine is gone: {service.client.failure}", code="engine_gone", retry_after_s=5)
        self._ticket = ticket
        ticket.wait_with(self.prompt_tokens)
        self.meters = [PromptMeter(service.metrics, arrival_s, len(p.ids), params) for p in prompts]
        service.calls.add(self)
        try:
            self._add_all()
        except BaseException:
            self.close()
            raise

    def _add_all(self) -> None:
        for number, (prompt, meter) in enumerate(zip(self.prompts, self.meters, strict=True)):
            entry, client, terms, name = self._entry, self._service.client, self._terms, self.answer_id
            if entry is None:
                key = client.add(prompt.ids, self.params, self._feed, meter, terms=terms, name=name)
            else:
                params, known = entry.params_of(number), entry.keys[number]
                key = client.add(prompt.ids, params, self._feed, meter, key=known, terms=terms, name=name)
            self._numbers[key] = number
            self._waiting.add(key)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(p.ids) for p in self.prompts)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        always = self._service.config.enable_prompt_tokens_details
        return usage_of(self.prompt_tokens, self.completion_tokens, self.cached_tokens, details_always=always)

    async def batches(self, keep_alive_s: float = 0.0) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What has come since the last batch; an empty one after ``keep_alive_s`` of silence. Raises ApiError."""
        while self._open:
            try:
                async with asyncio.timeout(keep_alive_s or None):
                    deltas = await self._feed.take()
            except TimeoutError:
                yield []
                continue
            except (PromptRefusedError, EngineGoneError) as e:
                raise self._failed(e) from e
            yield [(self._numbers[d.key], self._book(d)) for d in deltas]

    async def begun(self) -> None:
        """Wait for its first token. Raises ApiError where none comes, or it is not decoded."""
        try:
            deltas = await self._feed.begun()
        except (PromptRefusedError, EngineGoneError) as e:
            raise self._failed(e) from e
        for delta in deltas:
            self._check_late(delta)

    def _failed(self, error: PromptRefusedError | EngineGoneError) -> ApiError:
        if isinstance(error, EngineGoneError):
            self._carried = True
            return ApiError(503, f"the engine is gone: {error}", code="engine_gone", retry_after_s=5)
        if error.refusal is not None:
            self._service.metrics.rejected(error.refusal.reason)
            return too_late(str(error), error.refusal)
        return engine_error(str(error), error.blame, PARAMS)

    def _check_late(self, delta: Delta) -> None:
        if delta.refusal is not None:
            self._service.metrics.rejected(f"{delta.refusal.reason}_after_prefill")
            raise too_late(str(delta.stop_reason), delta.refusal)

    def _book(self, delta: Delta) -> Delta:
        self.completion_tokens += 0 if self.only_prompt else len(delta.tokens)
        self.cached_tokens += delta.cached or 0
        if delta.key in self._waiting:
            self._waiting.discard(delta.key)
            self._ticket.started(len(self.prompts[self._numbers[delta.key]].ids))
        if delta.finish_reason is not None:
            self._open -= 1
            self._ticket.finished()
            self._answered = self._answered and delta.finish_reason in ("stop", "length")
        self._check_late(delta)
        if delta.finish_reason == "error":
            raise engine_error(str(delta.stop_reason), delta.blame, PARAMS)
        return delta

    def abort(self, error: ApiError) -> None:
        """End it from outside: its reader gets ``error``. A journal keeps it for its next server."""
        self._carried = True
        self._feed.fail(error)
        self._cancel()

    def close(self) -> None:
        """Cancel what has not ended. Idempotent."""
        if self in self._service.calls:
            self._service.calls.discard(self)
            if self._turn is not None:
                self._turn.turns.end(self._turn.name, answered=not self._open and self._answered)
            if self._open:
                self._service.metrics.success("abort")
            self._cancel()
            if self._entry is not None and self._service.journal is not None and not self._carried:
                self._service.journal.drop(self._entry.accepted.id)
            self._ticket.close()

    def _cancel(self) -> None:
        for key in self._numbers:
            self._service.client.cancel(key)

    def log_fields(self) -> dict[str, Any]:
        """For the request's line in the log: how its answer's id begins, counts and times, no text."""
        firsts = [m.first_s for m in self.meters if m.first_s is not None]
        first = {"ttft_s": round(min(firsts), 4)} if firsts else {}
        named = {"answer_id": self.answer_id} if self.answer_id else {}
        return {**named, "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, **first}
