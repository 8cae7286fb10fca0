"""``lamina.AsyncLLM``: an LLM for asyncio, with many callers at once."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lamina.engine.engine_thread import EngineThread
from lamina.engine.streams import RequestOutputCollector
from lamina.models.tokenizer import token_ids
from lamina.protocol.executor import WorkerError
from lamina.request import RequestOutput, SamplingParams
from lamina.scheduler.sessions.cache_options import CacheOptions

from .frontend import Frontend, Prompt, priority_list, prompt_list
from .keyword_errors import keyword_errors

INLINE_CHARS = 512  # shorter text is tokenized at once: switching threads would take longer


class AsyncLLM:
    """An ``LLM`` for asyncio: any number of ``generate`` calls at once, whose requests are decoded in common batches.

    The constructor has the arguments of ``LLM``, and waits until the workers are ready. The engine has a thread of its
    own.

        async with AsyncLLM("path/to/model", memory_workers=2) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32), "my-request"):
                print(output.outputs[0].text)

    Raises ValueError, in one line that names the option and the fix, for any error of the user's; WorkerError when a
    worker process is lost.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, progress: bool = False, **options: Any) -> None:
        """``model``, ``tokenizer`` and ``options`` are those of ``LLM``. ``progress`` shows the start on a terminal."""
        with keyword_errors():
            front = self.front = Frontend(model, tokenizer, progress, options)
        if front.tokenizer is not None:
            token_ids(front.tokenizer, "")  # initializes it: from now on several threads use it
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="lamina-tokenizer")
        self.engine_thread = EngineThread(front.streams, front.pools, _wake, _closed)
        self.live: dict[str, _LoopCollector] = {}  # by request_id
        self._names = itertools.count()
        self._lock = threading.RLock()  # guards both; reentrant, as the garbage collector may run while it is held
        self._finalizer = weakref.finalize(self, _shut_down, self.engine_thread, self._tokenizing)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncStream:
        """Complete one prompt (text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}). Returns an asynchronous
        iterator, which yields a RequestOutput each time the request has grown. Each holds everything so far and never
        changes. A slow reader gets one output with all growth.

        This call queues the request. ``request_id`` names it in its outputs and for ``abort``; None = any name.
        ``priority``: with scheduling_policy "priority", lower numbers come first.

        Breaking out of the loop, cancelling the task, or closing the iterator cancels the request. The iterator raises
        ValueError for a prompt that cannot be served, WorkerError when a worker is lost. This call raises ValueError
        for a name in use.
        """
        self._check()
        prompts = prompt_list(prompt)
        if len(prompts) != 1:
            raise ValueError(f"generate takes one prompt, not {len(prompts)}: call it for each, they run together")
        params = self.front.default_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        (number,) = priority_list(1, priority)
        collector = self._register(request_id)
        add = partial(self._add, prompts[0], params, CacheOptions(priority=number), collector)
        if isinstance(prompts[0], str) and len(prompts[0]) > INLINE_CHARS:
            try:
                self._tokenizing.submit(add)
            except RuntimeError:  # another thread shuts down
                self._forget(collector)
                raise _closed() from None
        else:
            add()
        return AsyncStream(self, collector)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields the output so far, with finish_reason "abort". Ignores unknown names."""
        with self._lock:
            collector = self.live.get(request_id)
        if collector is not None:
            with suppress(RuntimeError):  # it has been shut down
                self._tokenizing.submit(self.engine_thread.abort, collector)  # after the request's tokenization

    async def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer, or None."""
        return self.front.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Stop using KV of earlier requests; later requests are computed whole. Always returns True."""
        self._check()
        self.engine_thread.reset_prefix_cache()
        return True

    @property
    def is_running(self) -> bool:
        """True while the engine takes requests."""
        return self.engine_thread.is_running

    @property
    def is_stopped(self) -> bool:
        """True if the engine has ended, by ``shutdown`` or by an error."""
        return not self.engine_thread.is_running

    @property
    def errored(self) -> bool:
        """True if the engine has ended by an error."""
        return self.engine_thread.error is not None

    @property
    def dead_error(self) -> WorkerError:
        """The error that every caller gets once the engine has ended by an error."""
        return WorkerError(str(self.engine_thread.error or "the engine has not failed"))

    async def check_health(self) -> None:
        """Raises ``dead_error`` if ``errored``, ValueError after ``shutdown``. The loss of a worker while nothing is
        decoded is noticed within seconds.
        """
        self._check()

    def shutdown(self) -> None:
        """End the engine and its workers; unfinished iterators raise ValueError. Idempotent. It waits for a step to
        end, and for processes: within a running event loop use ``async with``, or asyncio.to_thread.
        """
        self._finalizer()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def _check(self) -> None:
        if self.errored:
            raise self.dead_error
        if not self.engine_thread.is_running or not self._finalizer.alive:
            raise _closed()

    def _register(self, request_id: str | None) -> _LoopCollector:
        with self._lock:
            name = f"request-{next(self._names)}" if request_id is None else str(request_id)
            if (other := self.live.get(name)) is not None and other.is_unfinished:
                raise ValueError(f"request_id {name!r} is in use: give each request one of its own, or None")
            self.live[name] = collector = _LoopCollector(name=name)
        return collector

    def _add(
        self, prompt: str | list[int], params: SamplingParams, cache_options: CacheOptions, collector: _LoopCollector
    ) -> None:
        try:
            if not collector.dropped:
                self.engine_thread.add(
                    replace(self.front.engine_request(prompt, params), cache_options=cache_options), collector
                )
        except Exception as error:  # noqa: BLE001 - a tokenizer's error, too: no reader may wait forever
            collector.fail(error)
            _wake([collector])

    def _forget(self, collector: _LoopCollector) -> None:
        with self._lock:
            if self.live.get(collector.name) is collector:
                del self.live[collector.name]
        self.engine_thread.drop(collector)


class AsyncStream(AsyncIterator[RequestOutput]):
    """The outputs of one request as it grows; see ``AsyncLLM.generate``. One task at a time reads it."""

    def __init__(self, llm: AsyncLLM, collector: _LoopCollector) -> None:
        self._llm = llm
        self.collector = collector

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.collector.name

    async def __anext__(self) -> RequestOutput:
        if self.collector.dropped:
            raise StopAsyncIteration
        try:
            output = await self.collector.next()
        except BaseException:
            self._close()
            raise
        if output is None:
            self._close()
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Cancel the request if it is unfinished. Idempotent."""
        self._close()

    def _close(self) -> None:
        if not self.collector.dropped:
            self._llm._forget(self.collector)

    def __del__(self) -> None:
        self._close()


class _LoopCollector(RequestOutputCollector):
    """A collector whose reader waits in an event loop."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.name = name
        self.loop: asyncio.AbstractEventLoop | None = None  # the reader's, after its first read
        self.arrived = asyncio.Event()

    async def next(self) -> RequestOutput | None:
        """Return the output once it has grown; None at the end."""
        self.loop = asyncio.get_running_loop()  # set before the check, so later outputs wake the reader
        while True:
            self.arrived.clear()
            unfinished = self.is_unfinished  # read before the check, which then misses nothing
            if (output := self.get_nowait()) is not None or not unfinished:
                return output
            await self.arrived.wait()


def _wake(collectors: list[Any]) -> None:
    """Wake the readers of ``collectors``: one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_LoopCollector]] = {}
    for collector in collectors:
        if collector.loop is not None:
            by_loop.setdefault(collector.loop, []).append(collector)
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: no reader waits
            loop.call_soon_threadsafe(_set, waiting)


def _set(collectors: list[_LoopCollector]) -> None:
    for collector in collectors:
        collector.arrived.set()


def _closed() -> ValueError:
    return ValueError("this AsyncLLM is closed: create a new one")


def _shut_down(engine: EngineThread, tokenizing: ThreadPoolExecutor) -> None:
    tokenizing.shutdown(wait=False)  # remaining tasks find the engine closed, and their readers get the error
    engine.stop()
