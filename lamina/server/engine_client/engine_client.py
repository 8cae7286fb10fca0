"""The server's client of the engine process: adds prompts, passes deltas to their readers, and replaces a
lost engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.protocol.control import MAX_FRAME, Failed, Progress, Stop
from lamina.protocol.executor import WorkerError
from lamina.request import ErrorOrigin, SamplingParams
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions

from .engine_requests import EngineRequests
from .engine_restarts import EngineRestarts, PlanFailedError, PromptProgress
from .engine_watchdog import EngineHandle, EngineWatchdog, exit_reason_of, is_defect
from .frames import LENGTH, UnsendableError, framed, read_anyway
from .messages import (
    CancelPrompt,
    CordonWorker,
    Delta,
    EngineDefect,
    EngineReady,
    EngineState,
    Outputs,
    PromptRefused,
    ResetPrefixCache,
    ScaleMemory,
    ScaleReply,
    SessionsReply,
    SessionsRequest,
    WorkerCounters,
    detach,
    idle_state,
    state_for_workers,
)
from .open_prompts import DeltaObserver, DeltaSink, OpenPrompt, OpenPrompts
from .output_parts import OutputAssembler
from .reply_queue import ReplyQueue

FROM_ENGINE = (
    EngineReady
    | Progress
    | Outputs
    | EngineState
    | WorkerCounters
    | SessionsReply
    | ResetPrefixCache
    | PromptRefused
    | ScaleReply
    | Failed
    | EngineDefect
)
JOIN_S = 8.0
ANSWER_S = 10.0  # for the reply to a query
_RESIZE = "resize"  # the key of the one change of memory workers at a time
WATCH_S = 0.25  # between two checks whether the engine is stopped or hangs
log = logging.getLogger(__name__)


class EngineGoneError(WorkerError):
    """The engine process has ended; the text says why. ``by_defect``: it ended by an error of its own, not
    by a signal.
    """

    def __init__(self, text: str, *, by_defect: bool = False) -> None:
        super().__init__(text)
        self.by_defect = by_defect


class EngineBusyError(Exception):
    """The engine is being replaced or changed, and cannot be changed now."""


class QueryFailedError(Exception):
    """The engine failed to reply to a query, by a defect of its own."""


class EngineClient:
    """The connection to the engine. All methods belong to the event loop's thread."""

    def __init__(
        self,
        handle: EngineHandle,
        restarts: EngineRestarts,
        records: DeltaSink | None = None,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """``records``: gets all deltas before their readers. ``on_step``: called with the tokens of each step, see
        Outputs.
        """
        self.ready: EngineReady
        self.state: EngineState | None = None
        self.counters: dict[str, dict[str, float]] = {}
        self.failure: str | None = None  # why the engine is gone for good
        self.lost = asyncio.Event()  # set together with ``failure``, but not if ``close`` has ended the engine
        self.handle = handle  # of the engine's process, which another one may replace
        self.is_ready = False  # False: queries wait in this process
        self._restarts, self._on_step = restarts, on_step
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._hangs = False  # whether the engine was ended because it hung
        self._workers: set[int] = set()  # process ids of the engine's workers
        self._decoder = msgspec.msgpack.Decoder(FROM_ENGINE)
        self.prompts = OpenPrompts(self._send, records)
        self._requests = EngineRequests(self._send)
        self._closing, self._next_key, self._next_query = False, 0, 0
        self._state_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        handle: EngineHandle,
        on_progress: Callable[[Progress], None],
        restarts: EngineRestarts,
        records: DeltaSink | None = None,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> EngineClient:
        """Wait until a launched engine is ready. Raises ValueError for bad input, EngineGoneError if the
        engine ends.
        """
        client = cls(handle, restarts, records, on_step)
        await client._open(on_progress)
        client.prompts.resume()
        client._tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._watch())]
        return client

    async def _open(self, on_progress: Callable[[Progress], None]) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self.handle.sock)
        self._output_assembler, self._hangs = OutputAssembler(), False  # state of this engine only
        while True:
            message = await self._receive()
            if isinstance(message, EngineReady):
                self.ready, self._state_at, self.is_ready = message, time.monotonic(), True
                return
            if isinstance(message, Progress):
                on_progress(message)
            elif isinstance(message, Failed):
                raise ValueError(message.text) if message.user_error else EngineGoneError(message.text)

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since the engine last made progress, or was idle while all workers replied."""
        return time.monotonic() - self._state_at

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with a seed, as another engine may continue the request."""
        return self._restarts.with_seed(params)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        replies: ReplyQueue,
        meter: DeltaObserver,
        *,
        key: int | None = None,
        received: Sequence[Delta] | None = None,
        cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS,
        name: str = "",
    ) -> int:
        """Queue a prompt; its deltas go to ``replies`` under the returned key. ``key``: None = the client's next
        number; then every prompt must use None. ``received``: the deltas that an earlier server's engine has sent;
        None = the prompt is new. ``name``: the request's name in the log. Raises EngineGoneError.
        """
        if self.failure is not None:
            raise EngineGoneError(self.failure)
        if key is None:
            key, self._next_key = self._next_key, self._next_key + 1
        progress = PromptProgress(prompt, self.with_seed(params), cache_options, accepted=received is not None)
        for delta in received or ():
            progress.take(delta)
        self.prompts.add(key, OpenPrompt(replies, meter, progress, name))
        return key

    def cancel(self, key: int) -> None:
        """Cancel a prompt. Finished and unknown keys are ignored."""
        self.prompts.cancel(key)

    def reset_prefix_cache(self) -> None:
        """Make prompts that are added later find no KV of earlier ones."""
        reset = self._restarts.request_reset()
        if self.is_ready:
            self._send(reset)

    async def query(self, question: SessionsRequest) -> SessionsReply:
        """Return the engine's reply to a query about sessions. The query gets its number here. Raises EngineGoneError,
        QueryFailedError.
        """
        if self.failure is not None or not self.is_ready:
            raise EngineGoneError(self.failure or "it is being replaced")
        number, self._next_query = self._next_query, self._next_query + 1
        question = msgspec.structs.replace(question, number=number)
        try:
            answer: SessionsReply = await self._requests.ask(number, question, ANSWER_S)
        except TimeoutError:
            raise EngineGoneError(f"it has not replied for {ANSWER_S:g} s") from None
        except UnsendableError as e:
            log.error("a question cannot be sent to the engine: %s", e)
            raise QueryFailedError(f"the question cannot be sent to the engine: {e}") from None
        if answer.blame is ErrorOrigin.SERVER:
            raise QueryFailedError(answer.refusal)
        return answer

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine, or of the one that replaces it."""
        return self._restarts.config

    async def replace_engine(self, config: EngineConfig, leaving: Sequence[int] = ()) -> float:
        """Replace the engine by one with ``config``; all open prompts continue there from their tokens so far. If only
        the number of memory workers changes, the engine changes it in place where it can. ``leaving``: memory workers
        that must leave; they leave in place or not at all. Returns the seconds without an engine. Raises
        EngineBusyError, EngineGoneError, and PlanFailedError if no engine starts with ``config``; then one with the old
        configuration runs.
        """
        restarts = self._settled()
        had = restarts.config
        sizes = msgspec.structs.replace(config.topology, memory_workers=had.topology.memory_workers)
        if sizes == had.topology:
            wanted = ScaleMemory(config.topology.memory_workers, list(leaving))
            done = await asyncio.shield(self._change(wanted, config))
            if not done.error:
                return done.pause_s
            if done.in_place or leaving:
                raise PlanFailedError(done.error)
            log.info("all workers start anew, as %s", done.error)
        if not self.is_ready:
            raise EngineBusyError("the engine is being replaced: request it again once /health reports ok")
        planned, engine = restarts.plan(config), self.handle
        self._send(Stop())  # it sends its last outputs, and ends with its workers
        asyncio.get_running_loop().call_later(JOIN_S, self._kill_if_late, engine)
        return await asyncio.shield(planned)

    async def cordon(self, worker: int, *, on: bool) -> list[int]:
        """Let no new sequence begin on a memory worker or, with ``on=False``, allow it again. Returns all cordoned
        memory workers. Raises as ``replace_engine``.
        """
        restarts = self._settled()
        done = await self._change(CordonWorker(worker, on), restarts.config)
        if done.error:
            raise PlanFailedError(done.error)
        return done.cordoned

    async def _change(self, wanted: ScaleMemory | CordonWorker, config: EngineConfig) -> ScaleReply:
        """Change the memory workers of the running engine, which has ``config`` after that. The end of the engine
        counts as a reply. Raises EngineBusyError.
        """
        self._check_unchanging()  # again: others may have run since ``_settled``
        try:
            done: ScaleReply = await self._requests.ask(_RESIZE, wanted)
        except EngineGoneError as e:
            return ScaleReply(error=str(e))
        if not done.error:
            self._restarts.set_config(config)
        return done

    def _settled(self) -> EngineRestarts:
        """Return ``restarts``. Raises EngineGoneError, or EngineBusyError if the engine cannot be changed now."""
        if self.failure is not None:
            raise EngineGoneError(self.failure)
        if not self.is_ready or self._restarts.is_planned or self._closing:
            raise EngineBusyError("the engine is being replaced, or ended: request it again once /health reports ok")
        self._check_unchanging()
        return self._restarts

    def _check_unchanging(self) -> None:
        if _RESIZE in self._requests:
            raise EngineBusyError("its memory workers are already changing: request it again after that")

    def _kill_if_late(self, engine: EngineHandle) -> None:
        if engine is self.handle and self.is_ready and not self._closing:
            engine.join(0.0)

    def kill(self) -> None:
        """End the engine by force, now. Its workers end when their links do. ``close`` then waits for nothing."""
        self._closing = True
        self.handle.join(0.0)

    async def close(self) -> None:
        """End the engine and its workers. Idempotent."""
        self._closing = True
        self._send(Stop())
        # The link stays open while we wait: its end would make the engine hurry. A loading engine reads no messages.
        await asyncio.to_thread(self.handle.join, JOIN_S if self.is_ready or self.failure else 0.0)
        for task in self._tasks:
            task.cancel()
        self._writer.close()

    def _send(self, message: msgspec.Struct) -> None:
        """Send a message to the engine. Raises UnsendableError."""
        data = framed(message)
        with contextlib.suppress(OSError, RuntimeError):  # its link has ended: the next engine gets all prompts again
            self._writer.write(data)

    async def _receive(self) -> Any:
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_FRAME:
                raise EngineGoneError(f"the engine process sent a frame of {length} bytes", by_defect=True)
            frame = await self._reader.readexactly(length)
        except (EOFError, OSError) as e:
            fate = await asyncio.to_thread(exit_reason_of, self.handle)
            defect = is_defect(self.handle) or self._hangs
            raise EngineGoneError(f"the engine process (pid {self.handle.pid}) {fate}", by_defect=defect) from e
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as e:
            return self._mended(frame, e)

    def _mended(self, frame: bytes, error: Exception) -> Any:
        """Return what can be decoded of a frame; unreadable requests end by an error. Raises EngineGoneError."""
        if (mended := read_anyway(frame, error)) is None:
            raise EngineGoneError(f"the engine process sent what is no message: {error}", by_defect=True)
        log.error("a reply of the engine cannot be read, and its request ends by an error: %s", error)
        for key in mended.ended:
            self._send(CancelPrompt(key))
        return mended.message

    async def _read(self) -> None:
        reason = None
        while reason is None:
            try:
                reason = await self._listen()
            except Exception as e:  # a defect here: no reader may wait for an engine whose messages are not read
                log.exception("reading from the engine, or starting another one, has failed")
                reason = f"the server cannot continue with its engine: {type(e).__name__}: {e}"
        self.is_ready, self.failure = False, reason
        self._requests.fail(EngineGoneError(reason))
        self._restarts.forbid(reason)
        if not self._closing:
            log.error("the engine is gone, requests get 503: %s", reason)
            self.lost.set()
        self.prompts.fail(EngineGoneError(reason))

    async def _watch(self) -> None:
        """Kill an engine that is stopped or hangs, even an idle one: otherwise clients and health checks would wait."""
        watch = EngineWatchdog(self._restarts.config.deadlines)
        while not self.lost.is_set():
            await asyncio.sleep(WATCH_S)
            wanted = self.is_ready and self._restarts.is_allowed
            recovering = bool(self.state and self.state.recovering)
            if words := watch.check(self.handle, wanted=wanted, recovering=recovering):
                log.warning("the engine process (pid %d) %s", self.handle.pid, words)
                self._hangs = watch.hangs
                await asyncio.to_thread(self.handle.join, 0.0)

    async def _listen(self) -> str | None:
        """Handle the messages of one engine until it ends. Returns None if another engine runs then, else why there is
        none.
        """
        try:
            while True:
                message = await self._receive()
                if isinstance(message, EngineDefect):
                    return await self._restart(message.text, by_defect=True)
                if isinstance(message, Failed):
                    shrinks = self._restarts.shrink(message.workers_that_fit, message.lost_hosts)
                    continues = shrinks or self._restarts.is_planned
                    return await self._restart(message.text) if continues else message.text
                self._handle_message(message)
        except EngineGoneError as e:
            return await self._restart(str(e), by_defect=e.by_defect)

    async def _restart(self, reason: str, *, by_defect: bool = False) -> str | None:
        """Start another engine, which continues all open prompts. ``by_defect``: the last engine failed by a defect,
        which one of the prompts may have caused. Returns None on success, else why there is no other engine.
        """
        restarts, self.is_ready = self._restarts, False
        self._leave(by_defect=by_defect)
        self._requests.fail(EngineGoneError(reason))
        while not self._closing:
            if not (restarts.is_planned or restarts.is_allowed):
                return restarts.exit_message(reason)
            words = f"the engine ends, as planned ({reason})" if restarts.is_planned else reason
            log.warning("%s; another one replaces it, and all requests go on", words)
            free = list(map(min, self.ready.num_blocks))
            nothing = EngineState(running=0, waiting=0, free_blocks=free, steps=0)
            self.state = msgspec.structs.replace(self.state or nothing, recovering=True)
            self._writer.close()
            try:
                await self._next_engine(restarts)
                return None
            except EngineGoneError as e:  # the new engine died, too
                reason = str(e)
                restarts.give_up(reason)
                continue
            except TimeoutError:
                failed = f"another engine took too long to start (--start-timeout-s {restarts.limit_s:g})"
            except (ValueError, OSError) as e:
                failed = f"another engine cannot start: {e}"
            if not restarts.give_up(failed):
                return f"{reason}; {failed}"
        return reason

    def _leave(self, *, by_defect: bool) -> None:
        """Mark all prompts as without an engine. If the prompt that caused the failure is found, the failure costs no
        recovery, as long as some prompt has finished since the last such find. Otherwise a server whose engines all
        fail would never end.
        """
        defect = by_defect and not self._restarts.is_planned and not self._closing
        known = self.prompts.pause(by_defect=defect, at_once=self.ready.max_num_seqs)
        if known and self.prompts.some_ended:
            self._restarts.excuse()
        if known:
            self.prompts.some_ended = False

    async def _next_engine(self, restarts: EngineRestarts) -> None:
        """Start the next engine and send it all open prompts. Raises EngineGoneError, TimeoutError, ValueError,
        OSError.
        """
        had = self.ready
        self.handle = await restarts.begin(self.handle, self._workers)
        async with asyncio.timeout(restarts.limit_s):
            await self._open(lambda progress: None)
        assert self.state is not None
        self.state = msgspec.structs.replace(self.state, recovering=False)
        if self.ready.num_blocks != had.num_blocks:  # its workers differ from those of the last engine
            self.state, self.counters = idle_state(self.state, self.ready), {}
        for reset in restarts.pending_reset:
            self._send(reset)
        self.prompts.resume()
        restarts.end(self.prompts.requests)

    def _handle_message(self, message: Any) -> None:
        if isinstance(message, Outputs):
            self._state_at = time.monotonic()
            for delta in message.deltas:
                detach(delta)
            if (message := self._output_assembler.add(message)) is None:
                return
            if message.num_tokens:
                self._on_step(message.num_tokens)
            self.prompts.take(message.deltas)
        elif isinstance(message, EngineState):
            self._state_at, self.state = time.monotonic(), state_for_workers(message, self.ready)
        elif isinstance(message, ScaleReply):
            if message.ready is not None and not message.error:
                self.ready, self.counters = message.ready, {}
                self.state = state_for_workers(self.state, self.ready) if self.state is not None else None
            if message.was_requested:
                self._requests.on_reply(_RESIZE, message)
        elif isinstance(message, WorkerCounters):
            self.counters, self._workers = message.workers, set(message.pids)
            self.ready = msgspec.structs.replace(self.ready, hosts=message.hosts or self.ready.hosts)
        elif isinstance(message, SessionsReply):
            self._requests.on_reply(message.number, message)
        elif isinstance(message, ResetPrefixCache):
            self._restarts.on_reset_done(message)
        elif isinstance(message, PromptRefused):
            self.prompts.refuse(message)
