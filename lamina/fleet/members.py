"""The started workers, as the driver talks to them: every wait has a deadline, and whoever fails is named."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lamina.engine.wire import WorkerError
from lamina.protocol.control import (
    ClockTime,
    ComputeReady,
    ControlLink,
    Failed,
    LinkClosedError,
    LinkStalledError,
    MemoryReady,
    Progress,
    RankUrl,
    Rate,
    RingUrl,
    Stats,
    StepDone,
    Stop,
    Trace,
)

from .launcher import WorkerHandle

T = TypeVar("T")
STARTING = MemoryReady | RingUrl | RankUrl | ComputeReady | Progress
FROM_WORKERS = STARTING | StepDone | Stats | ClockTime | Rate | Trace | Failed
JOIN_S = 5.0
JOIN_AFTER_LOSS_S = 0.5
TAKE_S = 30.0  # for a worker to take a message, which it reads on a thread of its own
TAKE_LAST_S = 0.2  # at the end
REST_S = 5.0  # for the rest of a message that has begun to come
CAUSE_S = 0.3  # for a worker to say that it has failed, once its peer has
TICK_S = 0.25  # of silence, after which whoever waits looks round


class Member:
    """One worker and the link to it."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self.link = ControlLink(handle.sock, FROM_WORKERS)
        self.link.limit_sends(TAKE_S)
        self.inbox: deque[Any] = deque()  # messages that came while another one was awaited

    @property
    def label(self) -> str:
        return f"{self.handle.role}-{self.handle.index}"

    @property
    def name(self) -> str:
        return f"{self.handle.role} worker {self.handle.index} (pid {self.handle.pid})"

    @property
    def has_news(self) -> bool:
        """Whether it has sent something that nobody has taken yet."""
        poller = select.poll()
        poller.register(self.link, select.POLLIN)
        return bool(self.inbox or poller.poll(0))


class Members:
    """All workers of the pools, in the order in which they were added. Ends them all when one is lost."""

    def __init__(self, before_end: Callable[[float], None], after_end: Callable[[], None]) -> None:
        """``before_end`` may still talk to the workers for so many seconds; ``after_end``: they are gone."""
        self._members: list[Member] = []
        self._before_end, self._after_end = before_end, after_end
        self.closed = False  # by ``close``, or because a worker was lost
        self._ending = threading.RLock()  # one thread ends them; another may wait for a message meanwhile
        self.meanwhile: Callable[[], None] = lambda: None  # called a few times a second by whoever waits in silence

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, handle: WorkerHandle) -> Member:
        """A worker that was started."""
        self._members.append(Member(handle))
        return self._members[-1]

    def role(self, role: str) -> list[Member]:
        """Those of one role, by number."""
        return [m for m in self._members if m.handle.role == role]

    def close(self) -> None:
        """End all workers: ask, wait, then by force. Idempotent."""
        with self._ending:
            if not self.closed:
                self._end(JOIN_S)

    def fail(self, text: str) -> WorkerError:
        """End what is left after a loss: nobody can do anything useful any more, so by force and soon. The exception
        is for the caller to raise.
        """
        with self._ending:
            if not self.closed:
                self._end(JOIN_AFTER_LOSS_S)
        return WorkerError(text)

    def _end(self, join_s: float) -> None:
        for member in self._members:
            member.link.limit_sends(TAKE_LAST_S)
        try:
            self._before_end(join_s)
            for member in self._members:
                with contextlib.suppress(LinkClosedError):
                    member.link.send(Stop())
            for member in self._members:
                member.link.close()
            deadline = time.monotonic() + join_s
            for member in self._members:
                member.handle.join(max(0.0, deadline - time.monotonic()))
            self._after_end()
        finally:
            self.closed = True

    def send(self, member: Member, message: Any) -> None:
        """Raises WorkerError when the worker is gone or stands still, and as ``wait_for`` where it has said why."""
        try:
            member.link.send(message)
        except LinkStalledError:
            raise self.fail(f"{member.name} stands still: it took no message for {TAKE_S:g} s") from None
        except LinkClosedError:
            raise self._lost(member) from None

    def wait_for(self, wanted: list[Member], kind: Any, timeout_s: float, what: str) -> Any:
        """The next ``kind`` from any of ``wanted``, for ``timeout_s``; ``what`` it is for, in words.

        Raises WorkerError when any worker is lost or fails meanwhile, ValueError with what a user can put right.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for member in wanted:
                for message in member.inbox:
                    if isinstance(message, kind):
                        member.inbox.remove(message)
                        return message
            left = max(0.0, deadline - time.monotonic())
            if not self._read(min(left, TICK_S)):
                if not left:
                    raise self.fail(f"{', '.join(m.name for m in wanted)} took too long {what}")
                self.meanwhile()

    def arrived(self, kind: type[T]) -> list[tuple[Member, T]]:
        """Every ``kind`` that has come, and whose it is, without waiting. Raises as ``wait_for``."""
        while self._read(0.0):
            pass
        found = [(m, message) for m in self._members for message in m.inbox if isinstance(message, kind)]
        for member, message in found:
            member.inbox.remove(message)
        return found

    def _read(self, timeout_s: float) -> bool:
        """One message of each worker that has sent some, into its inbox. Whether there was any."""
        ready = self._ready(timeout_s)
        for member in ready:
            member.inbox.append(self._receive(member))
        return bool(ready)

    def _ready(self, timeout_s: float) -> list[Member]:
        """Who has sent something. Raises WorkerError where another thread has ended the workers."""
        poller = select.poll()
        try:
            for member in self._members:
                poller.register(member.link, select.POLLIN)
        except ValueError:  # a link that is closed has no number
            raise WorkerError("the workers have been ended") from None
        found = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        return [member for member in self._members if member.link.fileno() in found]

    def check(self) -> None:
        """Take in what has come, without a wait. Raises as ``wait_for`` where a worker is lost or has failed."""
        self._read(0.0)

    def _receive(self, member: Member) -> Any:
        try:
            message = member.link.recv(timeout_s=REST_S)
        except LinkClosedError:
            raise self._lost(member) from None
        if isinstance(message, Failed):
            raise self._failed(member, message)
        return message

    def _failed(self, member: Member, message: Failed) -> Exception:
        if message.user_error:
            self.close()
            return ValueError(message.text)
        # A worker often fails because another one died or failed: then that one is the news.
        others = sorted((m for m in self._members if m is not member), key=lambda m: m.handle.fate() is None)
        deadline = time.monotonic() + CAUSE_S
        for other in others:
            if message.by_peer or other.handle.fate() is not None:
                cause = self._failure_of(other, deadline)
                if cause is not None and not cause.by_peer:
                    message = cause
                elif cause is None and other.handle.fate() is not None:  # it ended without a word
                    return self._lost(other)
        return self.fail(message.text)

    def _failure_of(self, member: Member, deadline: float) -> Failed | None:
        """What ``member`` says about its end, if it is about to."""
        while True:
            try:
                message = member.link.recv(timeout_s=max(0.0, deadline - time.monotonic()))
            except (LinkClosedError, TimeoutError):
                return None
            if isinstance(message, Failed):
                return message

    def _lost(self, member: Member) -> Exception:
        said = self._failure_of(member, time.monotonic() + CAUSE_S)  # it may lie unread where only sending failed
        if said is not None:
            return self._failed(member, said)
        deadline = time.monotonic() + 1.0
        while member.handle.fate() is None and time.monotonic() < deadline:
            threading.Event().wait(0.01)  # the link ends a moment before the process can be waited for
        fate = member.handle.fate() or "closed its control link"
        return self.fail(f"{member.name} {fate}; its pool cannot go on and was ended: start again")
