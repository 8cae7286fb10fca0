"""The started workers and the driver's links to them. Every wait has a deadline, and an error names the worker that
failed.

Lost workers are reported, and all other workers are left as they are: the caller decides what follows.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from lamina.protocol.control import (
    ChannelLost,
    ClockTime,
    ComputeReady,
    ControlLink,
    Failed,
    LinkClosedError,
    LinkStalledError,
    Loaded,
    MemoryReady,
    Progress,
    Quiesced,
    Rate,
    Stats,
    StepDone,
    StepDoneAssembler,
    Stop,
    Trace,
)
from lamina.protocol.executor import Clock, WorkerError
from lamina.protocol.offload_messages import LoadReady, PagesExpired, StoredPages, TransferDone
from lamina.protocol.reshard import ReshardDone, StorePrepared, TerminationNotice
from lamina.protocol.step_plan import BlockScoresReport, StripesCopied

from .launchers import WorkerHandle

T = TypeVar("T")
JOIN_S = 5.0
JOIN_AFTER_LOSS_S = 0.5
SEND_STALL_S = 30.0  # for a worker to receive a message; a thread of its own reads them
LAST_SEND_STALL_S = 0.2  # the same while workers are ended
REST_S = 5.0  # for the rest of a message that has arrived in part
CAUSE_WAIT_S = 0.3  # for a worker to report its failure, once a peer has failed
RETRY_S = 600.0  # a living memory worker that two workers cannot reach within this time is replaced
EXIT_REASON_WAIT_S = 1.0  # for a process to have ended, once its link has
TICK_S = 0.25  # of silence, after which a wait calls ``on_tick``


FROM_WORKERS = (
    MemoryReady | Loaded | ComputeReady | Progress | StepDone | Stats | ClockTime | Rate | Trace
    | Quiesced | ChannelLost | Failed | StoredPages | TransferDone | LoadReady | BlockScoresReport | StorePrepared
    | ReshardDone | PagesExpired
    | TerminationNotice | StripesCopied
)  # fmt: skip


class Link(Protocol):
    """The driver's end of the control link to one worker; see ControlLink."""

    def limit_sends(self, seconds: float) -> None:
        """Limit, in seconds, how long a send waits while the worker receives nothing."""
        ...

    def send(self, message: Any) -> None:
        """Send one message. Raises LinkClosedError, LinkStalledError."""
        ...

    def recv(self, timeout_s: float | None = None) -> Any:
        """Return the next message. Raises TimeoutError, LinkClosedError."""
        ...

    def close(self) -> None:
        """End the link. Idempotent."""
        ...


class Links(Protocol):
    """Opens links, and waits for messages on them."""

    def open(self, handle: WorkerHandle) -> Link:
        """Return the link to a started worker."""
        ...

    def wait(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links on which messages, or the end, have arrived; none once the time has passed. Without links:
        just wait.

        Raises ValueError if a link was closed here.
        """
        ...


class ControlLinks:
    """Links over the sockets of worker handles."""

    def open(self, handle: WorkerHandle) -> ControlLink:
        """Return the control link of a started worker."""
        return ControlLink(handle.sock, FROM_WORKERS)

    def wait(self, links: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the links on which messages, or the end, have arrived; none once the time has passed."""
        poller = select.poll()
        for link in links:
            poller.register(link, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        return [link for link in links if link.fileno() in ready]


class WorkersLostError(WorkerError):
    """Workers are lost; the text names them and the reason. The other workers are unchanged."""

    def __init__(self, text: str, workers: Sequence[RegisteredWorker], *, ended: bool = False) -> None:
        """``ended``: whether the loss is certain, so no reply of these workers is awaited."""
        super().__init__(text)
        self.workers, self.is_certain = tuple(workers), ended


class BadInputError(ValueError):
    """A worker reports an error that the user can correct."""


class RegisteredWorker:
    """One worker and the link to it. ``on_loan``: another deployment runs it; however it ends, the run continues."""

    def __init__(self, handle: WorkerHandle, link: Link, *, on_loan: bool = False) -> None:
        self.handle, self.link, self.on_loan = handle, link, on_loan
        self.link.limit_sends(SEND_STALL_S)
        self.inbox: deque[Any] = deque()  # messages that came while another one was awaited
        self.step_parts = StepDoneAssembler()
        self.unreachable_peer = False  # though it lives, other workers cannot reach it

    @property
    def label(self) -> str:
        return f"{self.handle.role}-{self.handle.index}"

    @property
    def name(self) -> str:
        return f"{self.handle.role} worker {self.handle.index} (pid {self.handle.pid})"


class WorkerRegistry:
    """All workers of the pools, in the order in which they were added."""

    def __init__(
        self,
        before_end: Callable[[float], None],
        after_end: Callable[[], None],
        links: Links | None = None,
        clock: Clock = time.monotonic,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_end``: called with a number of seconds in which it may still use the links. ``after_end``: called
        once all workers have ended. ``on_tick``: called a few times a second during waits.
        """
        self._members: list[RegisteredWorker] = []
        self._before_end, self._after_end = before_end, after_end
        self._links, self._clock = links or ControlLinks(), clock
        self._looked = clock()
        self.epoch = 0  # messages of older epochs are dropped
        self._kinds_of_old_epochs: tuple[type[Any], ...] = ()  # except messages of these kinds
        self.lost_workers: dict[RegisteredWorker, WorkersLostError] = {}  # their links are not read any more
        self.has_notices = False  # an inbox may have a TerminationNotice
        self.worker_names = WeakKeyDictionary[WorkerHandle, str]()  # that they prove to their peers
        # Memory worker that lives -> when another worker could not reach it.
        self._named = dict[RegisteredWorker, float]()
        self.closed, self._ends = False, False  # set at the end and at the beginning of ``shut_down``
        self.ending_lock = threading.RLock()  # one thread ends the workers, while another one may wait for a message
        self._on_tick = on_tick

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return iter(self._members)

    def add(self, handle: WorkerHandle) -> RegisteredWorker:
        """Add a started worker as a member."""
        self._members.append(self.prepare(handle))
        return self._members[-1]

    def prepare(self, handle: WorkerHandle, *, on_loan: bool = False) -> RegisteredWorker:
        """Open the link of a started worker, without adding it as a member: its link is not read."""
        return RegisteredWorker(handle, self._links.open(handle), on_loan=on_loan)

    @property
    def memory(self) -> list[RegisteredWorker]:
        """Memory workers, by number."""
        return self._of("memory")

    @property
    def compute(self) -> list[RegisteredWorker]:
        """Compute workers, by number."""
        return self._of("compute")

    @property
    def prefill(self) -> list[RegisteredWorker]:
        """Prefill workers, by number."""
        return self._of("prefill")

    def _of(self, role: str) -> list[RegisteredWorker]:
        return [m for m in self._members if m.handle.role == role]

    @contextlib.contextmanager
    def register(self, new: RegisteredWorker) -> Iterator[None]:
        """Hold the registry open while a started worker is added. Raises WorkerError, and ends it, if all workers have
        been ended meanwhile.
        """
        with self.ending_lock:
            if self.closed:
                self.fence(new)
                raise WorkerError("the workers have been ended")
            yield

    def replace(self, lost: RegisteredWorker, new: RegisteredWorker) -> None:
        """Put another worker in the place of one that is lost and fenced. Raises as ``register`` does."""
        with self.register(new):
            self.has_notices = True  # it may have sent one as a spare
            self._members[self._members.index(lost)] = new
            del self.lost_workers[lost]

    def append(self, worker: RegisteredWorker) -> None:
        """Add a prepared worker as the last member."""
        self.has_notices = True  # it may have sent one while it was prepared
        self._members.append(worker)

    def insert(self, worker: RegisteredWorker) -> None:
        """Add a prepared worker after the members of its role with lower numbers."""
        role, index = worker.handle.role, worker.handle.index
        before = [i for i, m in enumerate(self._members) if m.handle.role == role and m.handle.index < index]
        there = [i for i, m in enumerate(self._members) if m.handle.role == role]
        self._members.insert(before[-1] + 1 if before else there[0], worker)

    def remove_lost(self, lost: RegisteredWorker) -> None:
        """Remove a member that is lost and fenced."""
        self._members.remove(lost)
        del self.lost_workers[lost]

    def remove(self, worker: RegisteredWorker) -> None:
        """Remove a member: its link is not read from now on."""
        self._members.remove(worker)

    def receive_from(self, worker: RegisteredWorker) -> Any:
        """Return the next message of a worker that is no member; None if there is none yet. Raises LinkClosedError,
        TimeoutError if the rest of a message does not come, and WorkerError if another thread has ended all workers.
        """
        return worker.link.recv(timeout_s=REST_S) if self._readable([worker.link], 0.0) else None

    def fence(self, lost: RegisteredWorker) -> None:
        """End a lost worker by force: nothing that it does from now on reaches any process."""
        lost.link.close()
        lost.handle.join(0.0)

    def mark_lost(self, worker: RegisteredWorker, why: WorkersLostError) -> None:
        """Count a member as lost, whatever it may still send."""
        self.lost_workers.setdefault(worker, why)

    def begin_epoch(self, epoch: int, still: tuple[type[Any], ...] = ()) -> None:
        """Drop messages of older epochs, also those that are still to come, except messages of the types ``still``."""
        self.epoch, self._kinds_of_old_epochs = epoch, still
        for member in self._members:
            member.inbox = deque(x for x in member.inbox if not self._is_old(x))

    def shut_down(self, join_s: float) -> None:
        """End all workers: request it, wait for ``join_s``, then use force. Idempotent."""
        with self.ending_lock:
            if not self.closed:
                self._end(join_s)

    def _end(self, join_s: float) -> None:
        self._ends = True
        for member in self._members:
            member.link.limit_sends(LAST_SEND_STALL_S)
        try:
            self._before_end(join_s)
            for member in self._members:
                with contextlib.suppress(LinkClosedError):
                    member.link.send(Stop())
            for member in self._members:
                member.link.close()
            deadline = self._clock() + join_s
            for member in self._members:
                member.handle.join(max(0.0, deadline - self._clock()))
            self._after_end()
        finally:
            self.closed = True

    def send(self, worker: RegisteredWorker, message: Any) -> None:
        """Send a message. Raises WorkersLostError if the worker is gone or stopped, and as ``wait_for`` does."""
        if worker in self.lost_workers:
            raise self.lost_workers[worker]
        try:
            worker.link.send(message)
        except LinkStalledError:
            text = f"{worker.name} does not respond: it received no message for {SEND_STALL_S:g} s"
            raise self._mark_lost(worker, text, ended=True) from None
        except LinkClosedError:
            raise self._on_closed(worker) from None

    def wait_for(self, wanted: Sequence[RegisteredWorker], kind: Any, timeout_s: float, what: str) -> Any:
        """Wait ``timeout_s`` for the next message of type ``kind`` from any of ``wanted``. ``what``: the purpose, for
        the error's text.

        Raises WorkersLostError if any worker is lost or fails meanwhile, BadInputError for an error that the user can
        correct.
        """
        deadline = self._clock() + timeout_s
        if self._clock() - self._looked >= TICK_S:  # replies of one worker must not hide that another one is stopped
            self._check_stalled()
        while True:
            for member in wanted:
                for message in member.inbox:
                    if isinstance(message, kind):
                        member.inbox.remove(message)
                        return message
            for member in wanted:
                if member in self.lost_workers:
                    raise self.lost_workers[member]
            left = max(0.0, deadline - self._clock())
            if not self._read(min(left, TICK_S)):
                if not left:
                    raise self.timeout_error(wanted, what)
                self._check_stalled()

    def _check_stalled(self) -> None:
        self._looked = self._clock()
        self._on_tick()

    def timeout_error(self, workers: Sequence[RegisteredWorker], what: str) -> WorkersLostError:
        """Return an error for the caller to raise: ``workers`` have not done ``what`` in time. They may still do it."""
        return WorkersLostError(f"{', '.join(m.name for m in workers)} took too long {what}", workers)

    def has_message(self, worker: RegisteredWorker) -> bool:
        """Return whether the member has sent a message that no call has returned yet."""
        return bool(worker.inbox or self._readable([worker.link], 0.0))

    def take_arrived(self, kind: type[T]) -> list[tuple[RegisteredWorker, T]]:
        """Return every arrived message of type ``kind`` with its worker, without waiting. Raises as ``wait_for``."""
        while self._read(0.0):
            pass
        messages = [(m, message) for m in self._members for message in m.inbox if isinstance(message, kind)]
        for member, message in messages:
            member.inbox.remove(message)
        return messages

    def read_messages(self, kind: type[T]) -> list[T]:
        """Return every message of type ``kind`` that has been read, also from lost workers."""
        messages = list[T]()
        for member in self._members:
            messages += [message for message in member.inbox if isinstance(message, kind)]
            member.inbox = deque(message for message in member.inbox if not isinstance(message, kind))
        return messages

    def check(self) -> None:
        """Read what has arrived, without waiting. Raises as ``wait_for`` does if a worker is lost or has failed."""
        self._read(0.0)

    def listen(self, timeout_s: float) -> None:
        """Read what arrives within ``timeout_s``. Raises as ``wait_for`` does if a worker is lost or has failed."""
        if not self._read(timeout_s):
            self._check_stalled()

    def _read(self, timeout_s: float) -> bool:
        """Read one message of each worker that has sent some, into its inbox. Returns whether there was any."""
        ready = self._ready(timeout_s)
        for member in ready:
            self._take(member, self._receive(member))
        return bool(ready)

    def _take(self, worker: RegisteredWorker, message: Any) -> None:
        if not self._is_old(message):
            whole = worker.step_parts.add(message) if isinstance(message, StepDone) else message
            self.has_notices |= isinstance(message, TerminationNotice)
            if whole is not None:
                worker.inbox.append(whole)

    def _is_old(self, message: Any) -> bool:
        return getattr(message, "epoch", self.epoch) < self.epoch and not isinstance(message, self._kinds_of_old_epochs)

    def _ready(self, timeout_s: float) -> list[RegisteredWorker]:
        """Return the members that have sent something. Raises as ``_readable`` does."""
        listened = {id(m.link): m for m in self._members if m not in self.lost_workers}
        return [listened[id(link)] for link in self._readable([m.link for m in listened.values()], timeout_s)]

    def _readable(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links with unread messages. Raises WorkerError if another thread has ended the workers."""
        try:
            return self._links.wait(links, timeout_s)
        except ValueError:
            raise WorkerError("the workers have been ended") from None

    def _receive(self, worker: RegisteredWorker) -> Any:
        message = self._next_of(worker)
        if isinstance(message, Failed):
            raise self._failed(worker, message)
        if isinstance(message, ChannelLost) and not self._is_old(message):
            raise self._broken(worker, message)
        return message

    def _next_of(self, worker: RegisteredWorker) -> Any:
        """Return the message that has begun to arrive. Raises as ``wait_for`` does."""
        try:
            return worker.link.recv(timeout_s=REST_S)
        except LinkClosedError:
            raise self._on_closed(worker) from None
        except TimeoutError:
            raise self._mark_lost(worker, f"{worker.name} sent only part of a message", ended=True) from None

    def _broken(self, worker: RegisteredWorker, message: ChannelLost) -> Exception:
        """Return the error for the end of one of ``worker``'s channels. A peer that has failed is lost. If all peers
        live, ``worker`` itself counts as lost, as all it has can be computed again. But a memory worker that was the
        unreachable peer twice within RETRY_S is lost instead.
        """
        if self.lost_workers:  # the end of a lost member has ended this channel
            return next(iter(self.lost_workers.values()))
        if message.missing_kv:
            return self._lacking(worker, message)
        others = {id(m.link): m for m in self._members if m is not worker and m not in self.lost_workers}
        deadline = self._clock() + CAUSE_WAIT_S
        while (left := deadline - self._clock()) > 0.0:
            for link in self._readable([m.link for m in others.values()], left):
                other = others[id(link)]
                try:
                    failure = self._next_of(other)
                except (WorkersLostError, BadInputError) as cause:
                    return cause
                if isinstance(failure, Failed):
                    return self._failed(other, failure)
                if isinstance(failure, ChannelLost) and failure.missing_kv and not self._is_old(failure):
                    return self._lacking(other, failure)  # which ended its channels
                self._take(other, failure)
        if message.is_serving:
            text = f"{worker.name} has lost a channel to another memory worker: {message.text}"
            return WorkersLostError(text, [], ended=True)
        named = next((m for m in self.memory if message.peer and self.worker_names.get(m.handle) == message.peer), None)
        if named and self._clock() - self._named.get(named, -RETRY_S) < RETRY_S:
            named.unreachable_peer = True
            return self._mark_lost(
                named, f"other workers could not reach {named.name} twice: {message.text}", ended=True
            )
        if named:
            self._named = {m: at for m, at in self._named.items() if m in self.memory} | {named: self._clock()}
        return self._mark_lost(worker, f"{worker.name} cannot reach other workers: {message.text}", ended=True)

    def _lacking(self, worker: RegisteredWorker, message: ChannelLost) -> WorkersLostError:
        return WorkersLostError(
            f"{worker.name} reports a state that the driver did not know: {message.text}", [], ended=True
        )

    def _mark_lost(self, worker: RegisteredWorker, text: str, *, ended: bool = False) -> WorkersLostError:
        return self.lost_workers.setdefault(worker, WorkersLostError(text, [worker], ended=ended or worker.on_loan))

    def _failed(self, worker: RegisteredWorker, message: Failed) -> Exception:
        if message.user_error and not worker.on_loan:
            return BadInputError(message.text)
        # A worker often fails because another one died or failed: then that one is reported.
        others = sorted(
            (m for m in self._members if m is not worker and m not in self.lost_workers),
            key=lambda m: m.handle.exit_reason() is None,
        )
        deadline, cause, lost = self._clock() + CAUSE_WAIT_S, message, self._mark_lost(worker, message.text)
        for other in others:
            if cause.caused_by_peer or other.handle.exit_reason() is not None:
                failure = self._failure_of(other, deadline)
                if failure is not None:
                    error = self._mark_lost(other, failure.text)
                    cause, lost = (cause, lost) if failure.caused_by_peer else (failure, error)
                elif other.handle.exit_reason() is not None:  # it ended without a message
                    return self._on_closed(other)
        return lost

    def _failure_of(self, worker: RegisteredWorker, deadline: float) -> Failed | None:
        """Return the error by which ``worker`` reports its end, if one comes before ``deadline``; else None."""
        while True:
            try:
                message = worker.link.recv(timeout_s=max(0.0, deadline - self._clock()))
            except (LinkClosedError, TimeoutError):
                return None
            if isinstance(message, Failed):
                return message
            self._take(worker, message)

    def _on_closed(self, worker: RegisteredWorker) -> Exception:
        if self._ends:  # another thread ends the workers, and closed this link
            return WorkerError("the workers have been ended")
        failure = self._failure_of(worker, self._clock() + CAUSE_WAIT_S)  # it may be unread if only a send failed
        if failure is not None:
            return self._failed(worker, failure)
        deadline = self._clock() + EXIT_REASON_WAIT_S
        while worker.handle.exit_reason() is None and self._clock() < deadline:
            self._links.wait([], 0.01)  # the link ends a moment before the exit status is known
        fate = worker.handle.exit_reason() or "closed its control link"
        return self._mark_lost(worker, f"{worker.name} {fate}", ended=True)
