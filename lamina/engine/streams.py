"""Collectors of outputs for the readers of requests, used by ``LLM`` and ``AsyncLLM``.

An engine's outputs grow while they are read. A collector keeps only the length of each output. So a slow reader gets
one output with all tokens since its last one, however many steps that took.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from lamina.request import CompletionOutput, RequestOutput, SamplingParams
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionInfo, SessionName
from lamina.scheduler.sessions.session_turns import EMPTY_TRANSCRIPT, SessionTurns, TurnTranscript

from .engine import Engine
from .request import DecodeToken, IncrementalDetokenizer


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The parameters of ``Engine.add``."""

    prompt: list[int]
    params: SamplingParams
    text: str | None = None
    make_detokenizer: Callable[[], IncrementalDetokenizer] | None = None
    decode_token: DecodeToken | None = None
    cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS
    transcript: TurnTranscript = EMPTY_TRANSCRIPT  # the turn of a session


class RequestOutputCollector:
    """The outputs that a reader has not seen yet. One thread may fill it while another one reads."""

    def __init__(self, count: int = 1, *, finished_only: bool = False, name: str | None = None) -> None:
        """``count``: the number of requests. ``finished_only``: hold back unfinished outputs. ``name``: the request_id
        of its outputs; None: the engine's number.
        """
        self.request_ids: list[int] = []  # set when the engine adds them
        self.dropped = False  # it has no reader any more
        self._left = count  # unfinished requests
        self._finished_only = finished_only
        self._name = name
        self.grown: dict[int, _Mark] = {}  # by request; the one that has waited longest first
        self._error: Exception | None = None
        self._lock = threading.RLock()  # reentrant, since a finalizer may run while it is held

    @property
    def is_unfinished(self) -> bool:
        """True while an output may still grow."""
        return self._left > 0 and self._error is None

    def put(self, output: RequestOutput) -> None:
        """Note that an output has grown. Takes constant time."""
        finished = output.finished
        with self._lock:
            self._left -= finished
            if finished or not self._finished_only:
                self.grown[output.request_id] = _Mark(output)

    def fail(self, error: Exception) -> None:
        """End the collector: ``get_nowait`` raises ``error`` after the outputs that exist.

        Later errors are ignored, and so are all once every request is finished.
        """
        with self._lock:
            if self._left > 0:
                self._error = self._error or error

    def get_nowait(self) -> RequestOutput | None:
        """Returns a copy of an output that has grown since it was returned last; None if there is none.

        Raises the error of ``fail``, once no output is left.
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
    """The requests of an engine and their collectors. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collectors: dict[int, RequestOutputCollector] = {}  # by unfinished request
        self._turns = SessionTurns()
        self._session_of_request: dict[int, SessionName] = {}  # by unfinished request that is a turn

    def add(self, requests: list[EngineRequest], collector: RequestOutputCollector) -> None:
        """Queue requests, whose outputs ``collector`` gets; or none of them, if one raises.

        Raises ValueError for a request that cannot be served, and errors of the tokenizer.
        """
        for a in requests:
            self.engine.check(a.prompt, a.params, a.cache_options)
        try:
            for a in requests:
                request_id = self._add(a)
                collector.request_ids.append(request_id)
                self.collectors[request_id] = collector
        except BaseException:
            self.drop(collector)
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
        """The sessions of the engine's only tenant."""
        return self.engine.sessions.list_tenant(b"")

    def drop_session(self, name: str) -> bool:
        """Drop a session and its KV. Returns False for an unknown one. Raises SessionBusyError during a turn of it."""
        self._turns.drop_session(SessionName(b"", name))
        return self.engine.sessions.drop(SessionName(b"", name))

    def step(self) -> list[RequestOutputCollector]:
        """Run ``Engine.step``. Returns the collectors with new outputs. Raises WorkerError if a worker is lost."""
        fed = []
        for output in self.engine.step():
            collector = self.collectors.get(output.request_id)
            if collector is not None:
                collector.put(output)
                fed.append(collector)
                if output.finished:
                    del self.collectors[output.request_id]
                    self._end_turn(output.request_id, answered=_answered(output))
        return fed

    def drop(self, collector: RequestOutputCollector) -> None:
        """Cancel the unfinished requests of ``collector``, which has no reader any more. Idempotent."""
        collector.dropped = True
        for request_id in collector.request_ids:
            if self.collectors.pop(request_id, None) is not None:
                self.engine.cancel(request_id)
                self._end_turn(request_id, answered=False)

    def abort(self, collector: RequestOutputCollector) -> None:
        """End the unfinished requests of ``collector``, which gets their outputs with the finish_reason "abort"."""
        for request_id in collector.request_ids:
            if self.collectors.pop(request_id, None) is not None and (output := self.engine.cancel(request_id)):
                collector.put(output)
                self._end_turn(request_id, answered=False)

    def pop_collectors(self) -> list[RequestOutputCollector]:
        """Remove all requests. Returns their collectors, which the caller fails."""
        collectors, self.collectors = list(self.collectors.values()), {}
        return collectors


def _answered(output: RequestOutput) -> bool:
    return all(o.finish_reason in ("stop", "length") for o in output.outputs)


class _Mark:
    """The state of an output at one time. Its lists only grow at their ends, so their lengths are enough."""

    def __init__(self, output: RequestOutput) -> None:
        self._of = output
        self._each = [(len(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in output.outputs]
        self._scored = len(output.prompt_logprobs or ())
        self._times = copy(output.times)

    def output(self, request_id: str) -> RequestOutput:
        """The output as it was then. It shares the prompt with the original, and nothing that grows."""
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
