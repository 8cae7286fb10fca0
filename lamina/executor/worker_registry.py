"""The started workers, as the driver talks to them: every wait has a deadline, and a worker that fails is named.

Lost workers are reported, and the others are left as they are: the caller decides what follows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lamina.protocol.control import ChannelLost, Failed, LinkClosedError, LinkStalledError, StepDone, Stop
from lamina.protocol.executor import Clock, WorkerError
from lamina.protocol.step_parts import StepDoneAssembler

from .control_links import ControlLinks, Link, Links
from .launchers import WorkerHandle

T = TypeVar("T")
JOIN_S = 5.0
JOIN_AFTER_LOSS_S = 0.5
SEND_STALL_S = 30.0  # for a worker to take a message, which it reads on a thread of its own
LAST_SEND_STALL_S = 0.2  # at the end
REST_S = 5.0  # for the rest of a message that has begun to come
CAUSE_WAIT_S = 0.3  # for a worker to say that it has failed, once its peer has
RETRY_S = 600.0  # a living memory worker that two workers cannot reach within this time is replaced
EXIT_REASON_WAIT_S = 1.0  # for a process to have ended, once its link has
TICK_S = 0.25  # of silence, after which whoever waits looks round


class WorkersLostError(WorkerError):
    """Workers are lost: the text says which, and how. The others are as they were."""

    def __init__(self, text: str, workers: Sequence[RegisteredWorker], *, ended: bool = False) -> None:
        """``ended``: whether the loss is certain, so no answer of these workers is awaited."""
        super().__init__(text)
        self.workers, self.is_certain = tuple(workers), ended


class BadInputError(ValueError):
    """A worker says what a user can put right."""


class RegisteredWorker:
    """One worker and the link to it. ``on_loan``: another deployment runs it; however it ends, the run goes on."""

    def __init__(self, handle: WorkerHandle, link: Link, *, on_loan: bool = False) -> None:
        self.handle, self.link, self.on_loan = handle, link, on_loan
        self.link.limit_sends(SEND_STALL_S)
        self.inbox: deque[Any] = deque()  # messages that came while another one was awaited
        self.step_parts = StepDoneAssembler()
        self.unreachable_peer = False  # though it lives: others have lost their way to it

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
    ) -> None:
        """``before_end`` may still talk to the workers for so many seconds; ``after_end``: they are gone."""
        self._members: list[RegisteredWorker] = []
        self._before_end, self._after_end = before_end, after_end
        self._links, self._clock = links or ControlLinks(), clock
        self._looked = clock()
        self.epoch = 0  # messages of older epochs are dropped
        self._kinds_of_old_epochs: tuple[type[Any], ...] = ()  # but of these kinds
        self.lost_workers: dict[RegisteredWorker, WorkersLostError] = {}  # nobody listens to these any more
        self.worker_names = WeakKeyDictionary[WorkerHandle, str]()  # that they prove to their peers
        self._named = dict[RegisteredWorker, float]()  # when somebody has lost its way to a memory worker that lives
        self.closed, self._ends = False, False  # by ``shut_down``, and as that begins
        self.ending_lock = threading.RLock()  # one thread ends them; another may wait for a message meanwhile
        self.on_tick: Callable[[], None] = lambda: None  # called a few times a second by whoever waits

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return iter(self._members)

    def add(self, handle: WorkerHandle) -> RegisteredWorker:
        """A worker that was started."""
        self._members.append(self.prepare(handle))
        return self._members[-1]

    def prepare(self, handle: WorkerHandle, *, on_loan: bool = False) -> RegisteredWorker:
        """A worker that was started and is none of these yet: nobody listens to it."""
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
        """To take in one that was started. Raises WorkerError where all have been ended meanwhile, and ends it, too."""
        with self.ending_lock:
            if self.closed:
                self.fence(new)
                raise WorkerError("the workers have been ended")
            yield

    def replace(self, lost: RegisteredWorker, new: RegisteredWorker) -> None:
        """Another worker takes the place of one that is lost, and fenced. Raises as ``register``."""
        with self.register(new):
            self._members[self._members.index(lost)] = new
            del self.lost_workers[lost]

    def append(self, worker: RegisteredWorker) -> None:
        """Take in a member that was prepared."""
        self._members.append(worker)

    def insert(self, worker: RegisteredWorker) -> None:
        """Add a prepared member, behind the members of its role with lower numbers."""
        role, index = worker.handle.role, worker.handle.index
        before = [i for i, m in enumerate(self._members) if m.handle.role == role and m.handle.index < index]
        there = [i for i, m in enumerate(self._members) if m.handle.role == role]
        self._members.insert(before[-1] + 1 if before else there[0], worker)

    def remove_lost(self, lost: RegisteredWorker) -> None:
        """Leave one out that is lost, and fenced."""
        self._members.remove(lost)
        del self.lost_workers[lost]

    def remove(self, worker: RegisteredWorker) -> None:
        """Leave a member out from now on: nobody listens to it."""
        self._members.remove(worker)

    def receive_from(self, worker: RegisteredWorker) -> Any:
        """The next message of one that is none of these; None where there is none yet. Raises LinkClosedError, and
        WorkerError where another thread has ended all.
        """
        return worker.link.recv(timeout_s=REST_S) if self._readable([worker.link], 0.0) else None

    def fence(self, lost: RegisteredWorker) -> None:
        """End one that is lost, by force: nothing that it does from here on reaches anybody."""
        lost.link.close()
        lost.handle.join(0.0)

    def mark_lost(self, worker: RegisteredWorker, why: WorkersLostError) -> None:
        """Count a member as lost, whatever it may still say."""
        self.lost_workers.setdefault(worker, why)

    def begin_epoch(self, epoch: int, still: tuple[type[Any], ...] = ()) -> None:
        """Drop messages of older epochs, those that still come included, but for the kinds ``still``."""
        self.epoch, self._kinds_of_old_epochs = epoch, still
        for member in self._members:
            member.inbox = deque(x for x in member.inbox if not self._is_old(x))

    def shut_down(self, join_s: float) -> None:
        """End all workers: ask, wait for so long, then by force. Idempotent."""
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
        """Raises WorkersLostError when the worker is gone or stands still, and as ``wait_for`` where it has said
        why."""
        if worker in self.lost_workers:
            raise self.lost_workers[worker]
        try:
            worker.link.send(message)
        except LinkStalledError:
            text = f"{worker.name} stands still: it took no message for {SEND_STALL_S:g} s"
            raise self._mark_lost(worker, text, ended=True) from None
        except LinkClosedError:
            raise self._on_closed(worker) from None

    def wait_for(self, wanted: Sequence[RegisteredWorker], kind: Any, timeout_s: float, what: str) -> Any:
        """The next ``kind`` from any of ``wanted``, for ``timeout_s``; ``what`` it is for, in words.

        Raises WorkersLostError when any worker is lost or fails meanwhile, BadInputError with what a user can put
        right.
        """
        deadline = self._clock() + timeout_s
        if self._clock() - self._looked >= TICK_S:  # answers of one worker must not hide that another one stands still
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
        self.on_tick()

    def timeout_error(self, workers: Sequence[RegisteredWorker], what: str) -> WorkersLostError:
        """For the caller to raise: ``workers`` have not done ``what`` in time. They may do so yet."""
        return WorkersLostError(f"{', '.join(m.name for m in workers)} took too long {what}", workers)

    def has_message(self, worker: RegisteredWorker) -> bool:
        """Whether the member has sent something that nobody has taken yet."""
        return bool(worker.inbox or self._readable([worker.link], 0.0))

    def take_arrived(self, kind: type[T]) -> list[tuple[RegisteredWorker, T]]:
        """Every ``kind`` that has come, and whose it is, without waiting. Raises as ``wait_for``."""
        while self._read(0.0):
            pass
        messages = [(m, message) for m in self._members for message in m.inbox if isinstance(message, kind)]
        for member, message in messages:
            member.inbox.remove(message)
        return messages

    def read_messages(self, kind: type[T]) -> list[T]:
        """Every ``kind`` that has been read, also of those that are lost."""
        messages = list[T]()
        for member in self._members:
            messages += [message for message in member.inbox if isinstance(message, kind)]
            member.inbox = deque(message for message in member.inbox if not isinstance(message, kind))
        return messages

    def check(self) -> None:
        """Take in what has come, without a wait. Raises as ``wait_for`` where a worker is lost or has failed."""
        self._read(0.0)

    def listen(self, timeout_s: float) -> None:
        """Take in what comes in so long. Raises as ``wait_for`` where a worker is lost or has failed."""
        if not self._read(timeout_s):
            self._check_stalled()

    def _read(self, timeout_s: float) -> bool:
        """One message of each worker that has sent some, into its inbox. Whether there was any."""
        ready = self._ready(timeout_s)
        for member in ready:
            self._take(member, self._receive(member))
        return bool(ready)

    def _take(self, worker: RegisteredWorker, message: Any) -> None:
        if not self._is_old(message):
            whole = worker.step_parts.add(message) if isinstance(message, StepDone) else message
            if whole is not None:
                worker.inbox.append(whole)

    def _is_old(self, message: Any) -> bool:
        return getattr(message, "epoch", self.epoch) < self.epoch and not isinstance(message, self._kinds_of_old_epochs)

    def _ready(self, timeout_s: float) -> list[RegisteredWorker]:
        """The members that have sent something. Raises as ``_readable``."""
        listened = {id(m.link): m for m in self._members if m not in self.lost_workers}
        return [listened[id(link)] for link in self._readable([m.link for m in listened.values()], timeout_s)]

    def _readable(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Those that have sent something. Raises WorkerError where another thread has ended the workers."""
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
        """The message that has begun to come. Raises as ``wait_for``."""
        try:
            return worker.link.recv(timeout_s=REST_S)
        except LinkClosedError:
            raise self._on_closed(worker) from None
        except TimeoutError:
            raise self._mark_lost(worker, f"{worker.name} stands still in the midst of a message", ended=True) from None

    def _broken(self, worker: RegisteredWorker, message: ChannelLost) -> Exception:
        """One of its channels has ended: whoever was at the other end is lost. Where all live, it is itself: it has
        nothing that cannot be had again. A memory worker that is at the other end twice in RETRY_S is lost, though.
        """
        if self.lost_workers:  # a lost member has ended channels of others
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
                    return self._lacking(other, failure)  # and has ended its channels
                self._take(other, failure)
        named = next((m for m in self.memory if message.peer and self.worker_names.get(m.handle) == message.peer), None)
        if named and self._clock() - self._named.get(named, -RETRY_S) < RETRY_S:
            named.unreachable_peer = True
            return self._mark_lost(
                named, f"others have lost their way to {named.name} twice: {message.text}", ended=True
            )
        if named:
            self._named = {m: at for m, at in self._named.items() if m in self.memory} | {named: self._clock()}
        return self._mark_lost(worker, f"{worker.name} has lost its way to others: {message.text}", ended=True)

    def _lacking(self, worker: RegisteredWorker, message: ChannelLost) -> WorkersLostError:
        return WorkersLostError(f"{worker.name} has met what the driver did not know: {message.text}", [], ended=True)

    def _mark_lost(self, worker: RegisteredWorker, text: str, *, ended: bool = False) -> WorkersLostError:
        return self.lost_workers.setdefault(worker, WorkersLostError(text, [worker], ended=ended or worker.on_loan))

    def _failed(self, worker: RegisteredWorker, message: Failed) -> Exception:
        if message.user_error and not worker.on_loan:
            return BadInputError(message.text)
        # A worker often fails because another one died or failed: then that one is the news.
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
                elif other.handle.exit_reason() is not None:  # it ended without a word
                    return self._on_closed(other)
        return lost

    def _failure_of(self, worker: RegisteredWorker, deadline: float) -> Failed | None:
        """The error that ``worker`` tells of its end, if it tells one before ``deadline``."""
        while True:
            try:
                message = worker.link.recv(timeout_s=max(0.0, deadline - self._clock()))
            except (LinkClosedError, TimeoutError):
                return None
            if isinstance(message, Failed):
                return message
            self._take(worker, message)

    def _on_closed(self, worker: RegisteredWorker) -> Exception:
        if self._ends:  # by another thread, and its link with it
            return WorkerError("the workers have been ended")
        failure = self._failure_of(worker, self._clock() + CAUSE_WAIT_S)  # it may lie unread where only sending failed
        if failure is not None:
            return self._failed(worker, failure)
        deadline = self._clock() + EXIT_REASON_WAIT_S
        while worker.handle.exit_reason() is None and self._clock() < deadline:
            self._links.wait([], 0.01)  # the link ends a moment before the process can be waited for
        fate = worker.handle.exit_reason() or "closed its control link"
        return self._mark_lost(worker, f"{worker.name} {fate}", ended=True)
