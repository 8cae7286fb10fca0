"""The engine's process. It knows nothing of HTTP or JSON."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from lamina import netstack
from lamina.engine.engine import Engine
from lamina.engine.scheduler_factory import build_parts
from lamina.engine.tuning.profiling import tune_num_batches
from lamina.engine.tuning.unloaded_latency import check_slo
from lamina.executor.counter_collection import has_progress
from lamina.executor.launchers import open_launcher
from lamina.executor.transport_choice import choose_transport
from lamina.executor.worker_executor import WorkerExecutor
from lamina.grammar.vocabulary import vocabulary_of
from lamina.models.tokenizer import load_in_background
from lamina.observe.log_lines import is_json
from lamina.protocol.control import (
    EPOCH_BITS,
    ControlLink,
    Failed,
    LinkBrokenError,
    LinkClosedError,
    Progress,
    Stop,
    Vocabulary,
)
from lamina.protocol.executor import ReducedCapacityError, WorkerError
from lamina.request import ErrorOrigin, OverloadedError, RequestOutput
from lamina.scheduler.conductor.overload import NO_LIMITS
from lamina.scheduler.sessions.session_table import SessionCopy, SessionInfo, SessionName
from lamina.utils.background_thread import LowPriorityCall
from lamina.utils.log_limit import limit_repeats
from lamina.workers.worker_process import write_error

from .frames import Garbled, garbled, in_place_of
from .live_request import ActivePrompt
from .messages import (
    AddPrompt,
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
    StartEngine,
    WorkerCounters,
)
from .operator_commands import run_command
from .output_parts import split_outputs
from .rebalance import REASON, Rebalancer
from .reports import ready_of, state_of

log = logging.getLogger(__name__)
FROM_SERVER = (
    StartEngine | AddPrompt | CancelPrompt | ResetPrefixCache | SessionsRequest | ScaleMemory | CordonWorker | Stop
)
IDLE_S = 1.0  # seconds that an idle engine waits for a message before it checks its workers
HEALTH_CHECK_S = 0.25  # the same, while some workers have not replied yet
WAIT_S = 0.01  # the same, while requests wait for KV blocks
STATE_S = 0.05
LAST_EPOCH = (1 << EPOCH_BITS) - 1024  # a change takes at least two epochs, and more if workers are lost meanwhile
MOST_UNSENDABLE = 1024  # keys that are remembered
COUNTERS_S = 0.9  # between two requests for all workers' counters, which also show whether workers live


class EngineDefectError(Exception):
    """A running engine has failed by a defect of its own."""


def serve_engine(sock: socket.socket) -> None:
    """Serve one server until its link ends or it sends Stop."""
    link = ControlLink(sock, FROM_SERVER)
    try:
        start = link.recv()
        if isinstance(start, StartEngine):
            set_up_engine_log(start)
            serve_link(link, start)
    except LinkClosedError:
        pass  # the server is gone, so this process ends too
    except (ValueError, OSError, ImportError) as e:
        _send(link, Failed(text=str(e), user_error=True))
    except ReducedCapacityError as e:
        _send(link, Failed(text=str(e), workers_that_fit=e.workers_that_fit, lost_hosts=e.lost_hosts))
    except WorkerError as e:
        _send(link, Failed(text=str(e)))
    except EngineDefectError as e:
        _send(link, EngineDefect(text=f"engine: {e}"))
        raise
    except Exception as e:
        write_error()
        _send(link, Failed(text=f"engine: {type(e).__name__}: {e}"))
        raise
    finally:
        link.close()


def set_up_engine_log(start: StartEngine) -> None:
    """Log the events of workers to stderr in the format of the server's lines."""
    if not is_json():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        limit_repeats()
    for room in ("lamina.executor", "lamina.engine"):
        logging.getLogger(room).setLevel(start.log_level.upper())


def serve_link(link: ControlLink, start: StartEngine) -> None:
    config, _ = choose_transport(start.config)
    here = netstack.in_process(config.launch.scheme)
    remote, limit_s = config.model.trust_remote_code, config.deadlines.start_timeout_s
    tokenizer = load_in_background(start.tokenizer or start.model, trust_remote_code=remote, here=here, limit_s=limit_s)

    def progress(stage: str, done: int, total: int) -> None:
        link.send(Progress(stage=stage, done=done, total=total))

    loop: EngineLoop | None = None

    def report() -> None:
        if loop is not None:
            loop.report()

    pools = WorkerExecutor(
        start.model, config, progress, launch=partial(open_launcher, without=start.lost_hosts), meanwhile=report
    )
    try:
        words = tokenizer.result(limit_s)
        start_reading: Callable[[], LowPriorityCall[Vocabulary]] | None = None
        vocabulary: Callable[[], Vocabulary] | None = None
        if words is not None:
            facts = pools.ready
            make = partial(vocabulary_of, words, facts.vocab_size, facts.eos_token_ids)
            start_reading = reading = cache(lambda: LowPriorityCall(make, "reading the vocabulary"))
            vocabulary = lambda: reading().result()  # noqa: E731
        limits, trace = start.conductor_config.limits, pools.tracer.recorder
        build = partial(build_parts, keeps_slo=limits != NO_LIMITS)
        engine = Engine(pools, config, trace=trace, features=pools.engine_features, build=build, vocabulary=vocabulary)
        tune_num_batches(engine, progress)
        if start.is_first:
            check_slo(engine, limits, progress)
        if start_reading is not None:
            start_reading()  # not before: it takes the interpreter's lock, and the measurements are done
        engine.slo_admission.set_config(start.conductor_config)
        loop = EngineLoop(link, engine, pools, words)
        try:
            loop.run()
        except (WorkerError, LinkClosedError):
            raise
        except Exception as e:
            write_error()
            raise EngineDefectError(f"{type(e).__name__}: {e}") from e
    finally:
        pools.close()


class EngineLoop:
    """Handles messages between steps. A thread of its own sends the replies, so no step waits for the server.

    ``run`` repeats ``take_messages``, ``advance`` and ``report``. They put messages for the server in ``outbox``.
    """

    def __init__(self, link: ControlLink, engine: Engine, pools: WorkerExecutor, tokenizer: Any) -> None:
        self._link = link
        self._engine = engine
        self._pools = pools
        self._tokenizer = tokenizer
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.active: dict[int, ActivePrompt] = {}  # by the server's key, until they end
        self._by_id: dict[int, ActivePrompt] = {}
        self._stopped = False
        self._steps = 0
        self._grown = 0  # tokens of the last step, see Outputs
        # Whether it was busy, its steps, and whether it recovered, in the last EngineState.
        self._reported = (False, 0, False)
        self._counters: dict[str, dict[str, float]] = {}
        self._epoch = -1  # the epoch whose workers the server knows
        self._rebalancer = Rebalancer(engine, pools)
        self._state_at = self._asked_at = 0.0
        self._sessions: dict[str, int] = {}  # sessions by tier at the last reply of the workers
        self._unsendable = deque[int](maxlen=MOST_UNSENDABLE)  # keys that ended so

    def run(self) -> None:
        self._link.send(self.ready())
        self.report_workers()
        threads = [threading.Thread(target=t, name="lamina-link", daemon=True) for t in (self._read, self._write)]
        for thread in threads:
            thread.start()
        try:
            while not (self._stopped or self._is_out_of_epochs()):
                self.take_messages()
                self.advance()
                self.report()
        finally:
            self.outbox.put(None)
            threads[1].join(1.0)

    def _is_out_of_epochs(self) -> bool:
        """Return True if nearly no epoch numbers are left. The engine then ends without a message, and another one
        continues.
        """
        spent = (view := self._pools.ready.epoch) >= LAST_EPOCH
        if spent:
            log.warning("epoch %d is one of the last that have a number: this engine ends, as if it had died", view)
        return spent

    def advance(self) -> None:
        if self._engine.has_work:
            self._grown = 0
            deltas = [d for o in self._engine.step() for d in self._deltas(o)]
            self._steps += 1
            if not self.active:
                self._report_state()  # first, so that gauges include the last output before a client reads it
            if deltas:
                self.outbox.put(Outputs(deltas, self._grown))
        else:
            self._engine.release_idle_blocks()
            self._engine.check_workers()

    def _deltas(self, output: RequestOutput) -> list[Delta]:
        live = self._by_id.get(output.request_id)
        if live is None:
            return []
        if output.finished:
            self._forget(live)
        deltas = live.deltas(output)
        begun = any(d.num_cached_tokens is not None for d in deltas)
        self._grown += sum(len(d.token_ids) for d in deltas) + begun * len(output.prompt_token_ids)
        return deltas

    def _forget(self, live: ActivePrompt) -> None:
        self.active.pop(live.key, None)
        self._by_id.pop(live.request_id, None)

    def take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            if (self._engine.idle or not self._engine.has_work) and not self._stopped:
                wait = WAIT_S if self._engine.has_work else HEALTH_CHECK_S if self._pools.has_pending_stats else IDLE_S
                self.take(self.inbox.get(timeout=wait))
            while True:
                self.take(self.inbox.get_nowait())

    def take(self, message: Any) -> None:
        if isinstance(message, AddPrompt):
            self._add(message)
        elif isinstance(message, CancelPrompt):
            if live := self.active.get(message.key):
                self._forget(live)
                self._engine.cancel(live.request_id)
        elif isinstance(message, ResetPrefixCache):
            self._engine.reset_prefix_cache()
            self.outbox.put(message)
        elif isinstance(message, ScaleMemory | CordonWorker):
            if (answer := run_command(self._engine, self._pools, message)) is not None:
                self.outbox.put(answer)
        elif isinstance(message, SessionsRequest):
            self._report_sessions(message)
        elif isinstance(message, Garbled):
            self._refuse_garbled(message)
        elif isinstance(message, Exception):
            raise RuntimeError(f"its link to the server has failed: {message}") from message
        else:
            self._stopped = True

    def _refuse_garbled(self, message: Garbled) -> None:
        log.error("a message of the server cannot be read, and its request gets an error: %s", message.text)
        if message.key is not None:
            self.outbox.put(PromptRefused(message.key, message.text, ErrorOrigin.SERVER))
        elif message.number is not None:
            self.outbox.put(SessionsReply(message.number, [], refusal=message.text, blame=ErrorOrigin.SERVER))

    def _report_sessions(self, request: SessionsRequest) -> None:
        sessions, copy, refusal, blame = list[SessionInfo](), None, "", ErrorOrigin.CLIENT
        try:
            sessions = self._engine.sessions.list_tenant(request.tenant)
            if request.drop is not None:
                sessions = [s for s in sessions if s.name == request.drop]
                self._engine.sessions.drop(SessionName(request.tenant, request.drop))
            copy = self._port_session(request)
        except ValueError as e:
            refusal = str(e)
        except WorkerError:
            raise
        except Exception as e:
            log.exception("a query about sessions failed")
            refusal, blame = f"the engine could not reply: {type(e).__name__}: {e}", ErrorOrigin.SERVER
        self.outbox.put(SessionsReply(request.number, sessions, copy, refusal, blame))

    def _port_session(self, request: SessionsRequest) -> SessionCopy | None:
        if request.import_ is not None:
            self._engine.sessions.import_copy(request.tenant, request.import_)
        if request.copy is None:
            return None
        self._engine.release_idle_blocks()  # the client has seen the end of its last turn; now the scheduler has too
        return self._engine.sessions.export(SessionName(request.tenant, request.copy))

    def _add(self, add: AddPrompt) -> None:
        try:
            self._engine.check(add.prompt, add.params, add.cache_options)
        except ValueError as e:
            self.outbox.put(PromptRefused(add.key, str(e), ErrorOrigin.CLIENT))
            return
        if sum(told.is_finished for told in add.resumed) == add.params.n:
            why = "all completions of this prompt have ended: there is nothing to continue"
            self.outbox.put(PromptRefused(add.key, why, ErrorOrigin.SERVER))
            return
        try:
            pieces = self._pieces(add)
            request_id = self._engine.add(
                add.prompt,
                add.params,
                make_detokenizer=pieces,
                resume_from=add.resumed,
                terms=add.cache_options,
                accepted=add.accepted,
            )
        except OverloadedError as e:
            self.outbox.put(PromptRefused(add.key, str(e), ErrorOrigin.LOAD, e.refusal))
            return
        except Exception as e:  # this prompt alone failed; no other one is affected
            log.exception("a prompt could not be added")
            self.outbox.put(PromptRefused(add.key, f"the engine could not add the prompt: {e}", ErrorOrigin.SERVER))
            return
        live = ActivePrompt(add, request_id)
        self.active[add.key] = self._by_id[request_id] = live

    def _pieces(self, add: AddPrompt) -> Any:
        if self._tokenizer is None:
            return None
        from lamina.models.tokenizer import Detokenizer

        skip = add.params.skip_special_tokens
        return lambda: Detokenizer(self._tokenizer, add.prompt, skip_special_tokens=skip)

    def report(self) -> None:
        """Send an EngineState if one is due: a few times a second while steps are done, and at the end of work. Also
        when all workers have replied and, during a step, one of them has progressed. No step waits for a reply.
        """
        now, busy, recovering = time.monotonic(), self._engine.has_work, self._pools.is_recovering
        was_busy, steps, was_recovering = self._reported
        due = (busy, recovering) != (was_busy, was_recovering)
        if (changed := self._pools.resizer.take_outcome()) is not None:
            error, asked = changed.error, changed.reason != REASON
            self.outbox.put(ScaleReply(error=error, pause_s=changed.pause_s, ready=self.ready(), was_requested=asked))
            due = True
        if self._pools.ready.epoch != self._epoch:
            self.report_workers()
        due = due or ((self._steps > steps or recovering) and now - self._state_at > STATE_S)
        if (counters := self._pools.collect_stats()) is not None:  # raises if a worker has not replied for long
            self.outbox.put(WorkerCounters(counters, list(self._pools.pids.values())))
            due = due or not busy or has_progress(self._counters, counters)
            self._counters = counters
            self._rebalancer.update(counters)
        if now - self._asked_at > COUNTERS_S:
            self._asked_at = now
            self._sessions = dict(self._engine.sessions.count_by_tier)
            self._pools.request_stats()
        if due:
            self._report_state()

    def report_workers(self) -> None:
        """Send the workers' process ids and hosts. Before another engine starts, the server waits until these processes
        have ended and freed their memory. An operator names hosts.
        """
        self._epoch = self._pools.ready.epoch
        self.outbox.put(WorkerCounters(self._counters, list(self._pools.pids.values()), self._pools.hosts))

    def _report_state(self) -> None:
        self._state_at = time.monotonic()
        self._reported = (self._engine.has_work, self._steps, self._pools.is_recovering)
        self.outbox.put(self.state())

    def state(self) -> EngineState:
        return state_of(self._engine, self._pools, self._sessions, self._steps)

    def ready(self) -> EngineReady:
        return ready_of(self._engine, self._pools)

    def _read(self) -> None:
        try:
            while not isinstance(message := self._receive(), Stop):
                self.inbox.put(message)
            self.inbox.put(message)
        except LinkBrokenError as e:
            self.inbox.put(e)
        except LinkClosedError:
            self.inbox.put(Stop())
        except Exception as e:  # noqa: BLE001 - the loop raises it: a deaf engine must not seem alive
            self.inbox.put(e)

    def _receive(self) -> Any:
        try:
            return self._link.recv()
        except LinkBrokenError as e:
            if (about := garbled(e.frame, e)) is None:
                raise
            return about

    def _write(self) -> None:
        try:
            while (message := self.outbox.get()) is not None:
                for part in split_outputs(message) if isinstance(message, Outputs) else (message,):
                    self._send(part)
        except LinkClosedError:
            pass  # the reader reports it
        except Exception as e:  # noqa: BLE001 - as in ``_read``
            self.inbox.put(e)

    def _send(self, message: Any) -> None:
        """Send a message, or an error in place of a reply that cannot be encoded. Raises what ``send`` raises."""
        try:
            self._link.send(message)
        except LinkClosedError:
            raise
        except Exception as e:
            if (mended := in_place_of(message, e)) is None:
                raise
            new = [key for key in mended.ended if key not in self._unsendable]
            if new or not mended.ended:  # more steps may be done before it is cancelled
                log.error("a reply cannot be encoded, and its request ends by an error: %s: %s", type(e).__name__, e)
            self._unsendable.extend(new)
            self._link.send(mended.message)
            for key in new:
                self.inbox.put(CancelPrompt(key))


def _send(link: ControlLink, message: Failed | EngineDefect) -> None:
    with contextlib.suppress(LinkClosedError):
        link.send(message)
