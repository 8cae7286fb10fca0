"""The readers of requests, and the outputs that each has not seen yet: one mechanism below ``LLM`` and ``AsyncLLM``.

An engine's outputs grow while they are read. Only the length of each output waits for its reader: a slow reader gets
one output with all tokens since its last one, however many steps that took.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from lamina.request import CompletionOutput, RequestOutput, SamplingParams
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionInfo, SessionName
from lamina.scheduler.sessions.session_turns import EMPTY_TRANSCRIPT, SessionTurns, TurnTranscript

from .engine import Engine
from .request import DecodeToken, IncrementalDetokenizer


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt as the engine takes it, see ``Engine.add``."""

    prompt: list[int]
    params: SamplingParams
    text: str | None = None
    make_detokenizer: Callable[[], IncrementalDetokenizer] | None = None
    decode_token: DecodeToken | None = None
    cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS
    transcript: TurnTranscript = EMPTY_TRANSCRIPT  # in a session


class RequestOutputCollector:
    """The outputs of a reader's requests that it has not seen yet. One thread may fill it while another one reads."""

    def __init__(self, count: int = 1, *, finished_only: bool = False, name: str | None = None) -> None:
        """``count``: requests. ``finished_only``: the reader wants none that still grows. ``name``: the request_id of
        what it gets; None = the engine's number.
        """
        self.request_ids: list[int] = []  # of its requests, once the engine has them
        self.dropped = False  # nobody reads it any more
        self._left = count  # not finished
        self._finished_only = finished_only
        self._name = name
        self.grown: dict[int, _Mark] = {}  # by request; the one that has waited longest first
        self._error: Exception | None = None
        self._lock = threading.RLock()  # a garbage collector may come by while it is held

    @property
    def is_unfinished(self) -> bool:
        """Whether some of its requests may still grow."""
        return self._left > 0 and self._error is None

    def put(self, output: RequestOutput) -> None:
        """One of its requests has grown. Takes the same time however long it is."""
        finished = output.finished
        with self._lock:
            self._left -= finished
            if finished or not self._finished_only:
                self.grown[output.request_id] = _Mark(output)

    def fail(self, error: Exception) -> None:
        """Nothing more will come: ``get_nowait`` raises ``error`` behind what has come. The first one stays; where all
        is finished, there is none.
        """
        with self._lock:
            if self._left > 0:
                self._error = self._error or error

    def get_nowait(self) -> RequestOutput | None:
        """The output of a request that has grown since it was taken last; it changes no more. None where none has
        grown.

        Raises what ``fail`` was told, once nothing is left.
        """
        with self._lock:
            if not self.grown:
                if self._error is not None:
                    raise self._error
                return None
            request_id = next(iter(self.grown))
            mark = self.grown.pop(request_id)
        return mark.output(str(request_id) if self._name is None else self._name)


class RequestStreams:
    """The requests of an engine that have a reader. One thread at a time uses it, the engine's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collectors: dict[int, RequestOutputCollector] = {}  # by unfinished request
        self._turns = SessionTurns()
        self._session_of_request: dict[int, SessionName] = {}  # unfinished request -> the session of which it is a turn

    def add(self, requests: list[EngineRequest], feed: RequestOutputCollector) -> None:
        """Queue requests, whose outputs ``feed`` gets. Raises ValueError for a request that cannot be served, and the
        tokenizer's error for tokens that it cannot show; then none is queued.
        """
        for a in requests:
            self.engine.check(a.prompt, a.params, a.cache_options)
        try:
            for a in requests:
                request_id = self._add(a)
                feed.request_ids.append(request_id)
                self.collectors[request_id] = feed
        except BaseException:
            self.drop(feed)
            raise

    def _add(self, a: EngineRequest) -> int:
        session = a.cache_options.session
        if session is not None:
            self._turns.begin(session, a.transcript)
        try:
            request_id = self.engine.add(
                a.prompt,
                a.params,
                text=a.text,
                make_detokenizer=a.make_detokenizer,
                decode_token=a.decode_token,
                terms=a.cache_options,
            )
        except BaseException:
            if session is not None:
                self._turns.end(session, answered=False)
            raise
        if session is not None:
            self._session_of_request[request_id] = session
        return request_id

    def _end_turn(self, request_id: int, *, answered: bool) -> None:
        if (name := self._session_of_request.pop(request_id, None)) is not None:
            self._turns.end(name, answered=answered)

    def sessions(self) -> list[SessionInfo]:
        """Of this engine, which has one tenant."""
        return self.engine.scheduler.features[SessionCache].list_tenant(b"")

    def drop_session(self, name: str) -> bool:
        """Forget a session and give up its KV; False: there is no such session. Raises SessionBusyError while a turn of
        it is under way.
        """
        self._turns.drop_session(SessionName(b"", name))
        return self.engine.drop_session(SessionName(b"", name))

    def step(self) -> list[RequestOutputCollector]:
        """``Engine.step``; the feeds that have got something. Raises WorkerError when a worker is lost."""
        fed = []
        for output in self.engine.step():
            feed = self.collectors.get(output.request_id)
            if feed is not None:
                feed.put(output)
                fed.append(feed)
                if output.finished:
                    del self.collectors[output.request_id]
                    self._end_turn(output.request_id, answered=_answered(output))
        return fed

    def drop(self, feed: RequestOutputCollector) -> None:
        """Nobody reads ``feed`` any more: cancel its unfinished requests. Idempotent."""
        feed.dropped = True
        for request_id in feed.request_ids:
            if self.collectors.pop(request_id, None) is not None:
                self.engine.cancel(request_id)
                self._end_turn(request_id, answered=False)

    def abort(self, feed: RequestOutputCollector) -> None:
        """End what is unfinished; its reader gets it as far as it came, with the finish_reason "abort"."""
        for request_id in feed.request_ids:
            if self.collectors.pop(request_id, None) is not None and (output := self.engine.cancel(request_id)):
                feed.put(output)
                self._end_turn(request_id, answered=False)

    def pop_collectors(self) -> list[RequestOutputCollector]:
        """The feeds of unfinished requests, for the caller to fail: none of them goes on."""
        feeds, self.collectors = list(self.collectors.values()), {}
        return feeds


def _answered(output: RequestOutput) -> bool:
    return all(o.finish_reason in ("stop", "length") for o in output.outputs)


class _Mark:
    """How far a request had come. Its lists only grow at their ends, so their lengths say it all."""

    def __init__(self, output: RequestOutput) -> None:
        self._of = output
        self._each = [(len(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in output.outputs]
        self._scored = len(output.prompt_logprobs or ())
        self._times = copy(output.times)

    def output(self, request_id: str) -> RequestOutput:
        """The request as it was then. It shares the prompt with other outputs of it, and nothing that grows."""
        of = self._of
        scores = of.prompt_logprobs
        if scores is not None and self._scored < len(of.prompt_token_ids):
            scores = scores[: self._scored]
        outputs = [_cut(o, *at) for o, at in zip(of.outputs, self._each, strict=True)]
        return replace(of, request_id=request_id, outputs=outputs, times=self._times, prompt_logprobs=scores)


def _cut(
    of: CompletionOutput, count: int, text: str, finish_reason: str | None, stop_reason: int | str | None
) -> CompletionOutput:
    logprobs = None if of.logprobs is None else of.logprobs[:count]
    blame = of.blame if finish_reason else None
    cut = of.token_ids[:count]
    return CompletionOutput(of.index, text, cut, finish_reason, stop_reason, logprobs, blame, of.kv_rebuilt)
