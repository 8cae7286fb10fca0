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

from lamina.engine.wire import Clock, WorkerError
from lamina.protocol.control import Broken, Failed, LinkClosedError, LinkStalledError, StepDone, Stop
from lamina.protocol.step_parts import StepParts

from .launchers import WorkerHandle
from .links import ControlLinks, Link, Links

T = TypeVar("T")
JOIN_S = 5.0
JOIN_AFTER_LOSS_S = 0.5
TAKE_S = 30.0  # for a worker to take a message, which it reads on a thread of its own
TAKE_LAST_S = 0.2  # at the end
REST_S = 5.0  # for the rest of a message that has begun to come
CAUSE_S = 0.3  # for a worker to say that it has failed, once its peer has
AGAIN_S = 600.0  # a living memory worker that two workers cannot reach within this time is replaced
FATE_S = 1.0  # for a process to have ended, once its link has
TICK_S = 0.25  # of silence, after which whoever waits looks round


class LostError(WorkerError):
    """Workers are lost: the text says which, and how. The others are as they were."""

    def __init__(self, text: str, members: Sequence[Member], *, ended: bool = False) -> None:
        """``ended``: without a word."""
        super().__init__(text)
        self.members, self.ended = tuple(members), ended


class BadInputError(ValueError):
    """A worker says what a user can put right."""


class Member:
    """One worker and the link to it. ``on_loan``: another deployment runs it; however it ends, the run goes on."""

    def __init__(self, handle: WorkerHandle, link: Link, *, on_loan: bool = False) -> None:
        self.handle, self.link, self.on_loan = handle, link, on_loan
        self.link.limit_sends(TAKE_S)
        self.inbox: deque[Any] = deque()  # messages that came while another one was awaited
        self.parts = StepParts()
        self.unreached = False  # though it lives: others have lost their way to it

    @property
    def label(self) -> str:
        return f"{self.handle.role}-{self.handle.index}"

    @property
    def name(self) -> str:
        return f"{self.handle.role} worker {self.handle.index} (pid {self.handle.pid})"


class Members:
    """All workers of the pools, in the order in which they were added."""

    def __init__(
        self,
        before_end: Callable[[float], None],
        after_end: Callable[[], None],
        links: Links | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """``before_end`` may still talk to the workers for so many seconds; ``after_end``: they are gone."""
        self._members: list[Member] = []
        self._before_end, self._after_end = before_end, after_end
        self._links, self._clock = links or ControlLinks(), clock
        self._looked = clock()
        self.view = 0  # messages of older views are dropped
        self._still_heard: tuple[type[Any], ...] = ()  # but of these kinds
        self.lost: dict[Member, LostError] = {}  # nobody listens to these any more
        self.names = WeakKeyDictionary[WorkerHandle, str]()  # that they prove to their peers
        self._named = dict[Member, float]()  # when somebody has lost its way to a memory worker that lives
        self.closed, self._ends = False, False  # by ``end``, and as that begins
        self.ending = threading.RLock()  # one thread ends them; another may wait for a message meanwhile
        self.meanwhile: Callable[[], None] = lambda: None  # called a few times a second by whoever waits

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, handle: WorkerHandle) -> Member:
        """A worker that was started."""
        self._members.append(self.prepare(handle))
        return self._members[-1]

    def prepare(self, handle: WorkerHandle, *, on_loan: bool = False) -> Member:
        """A worker that was started and is none of these yet: nobody listens to it."""
        return Member(handle, self._links.open(handle), on_loan=on_loan)

    @property
    def memory(self) -> list[Member]:
        """Memory workers, by number."""
        return self._of("memory")

    @property
    def compute(self) -> list[Member]:
        """Compute workers, by number."""
        return self._of("compute")

    @property
    def prefill(self) -> list[Member]:
        """Prefill workers, by number."""
        return self._of("prefill")

    def _of(self, role: str) -> list[Member]:
        return [m for m in self._members if m.handle.role == role]

    @contextlib.contextmanager
    def while_open(self, new: Member) -> Iterator[None]:
        """To take in one that was started. Raises WorkerError where all have been ended meanwhile, and ends it, too."""
        with self.ending:
            if self.closed:
                self.fence(new)
                raise WorkerError("the workers have been ended")
            yield

    def replace(self, lost: Member, new: Member) -> None:
        """Another worker takes the place of one that is lost, and fenced. Raises as ``while_open``."""
        with self.while_open(new):
            self._members[self._members.index(lost)] = new
            del self.lost[lost]

    def append(self, member: Member) -> None:
        """Take in a member that was prepared."""
        self._members.append(member)

    def insert(self, member: Member) -> None:
        """Add a prepared member, behind the members of its role with lower numbers."""
        role, index = member.handle.role, member.handle.index
        before = [i for i, m in enumerate(self._members) if m.handle.role == role and m.handle.index < index]
        there = [i for i, m in enumerate(self._members) if m.handle.role == role]
        self._members.insert(before[-1] + 1 if before else there[0], member)

    def drop(self, lost: Member) -> None:
        """Leave one out that is lost, and fenced."""
        self._members.remove(lost)
        del self.lost[lost]

    def remove(self, member: Member) -> None:
        """Leave a member out from now on: nobody listens to it."""
        self._members.remove(member)

    def hear(self, member: Member) -> Any:
        """The next message of one that is none of these; None where there is none yet. Raises LinkClosedError, and
        WorkerError where another thread has ended all.
        """
        return member.link.recv(timeout_s=REST_S) if self._heard([member.link], 0.0) else None

    def fence(self, lost: Member) -> None:
        """End one that is lost, by force: nothing that it does from here on reaches anybody."""
        lost.link.close()
        lost.handle.join(0.0)

    def give_up(self, member: Member, why: LostError) -> None:
        """Count a member as lost, whatever it may still say."""
        self.lost.setdefault(member, why)

    def enter(self, view: int, still: tuple[type[Any], ...] = ()) -> None:
        """Drop messages of older views, those that still come included, but for the kinds ``still``."""
        self.view, self._still_heard = view, still
        for member in self._members:
            member.inbox = deque(x for x in member.inbox if not self._is_old(x))

    def end(self, join_s: float) -> None:
        """End all workers: ask, wait for so long, then by force. Idempotent."""
        with self.ending:
            if not self.closed:
                self._end(join_s)

    def _end(self, join_s: float) -> None:
        self._ends = True
        for member in self._members:
            member.link.limit_sends(TAKE_LAST_S)
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

    def send(self, member: Member, message: Any) -> None:
        """Raises LostError when the worker is gone or stands still, and as ``wait_for`` where it has said why."""
        if member in self.lost:
            raise self.lost[member]
        try:
            member.link.send(message)
        except LinkStalledError:
            text = f"{member.name} stands still: it took no message for {TAKE_S:g} s"
            raise self._lose(member, text, ended=True) from None
        except LinkClosedError:
            raise self._gone(member) from None

    def wait_for(self, wanted: Sequence[Member], kind: Any, timeout_s: float, what: str) -> Any:
        """The next ``kind`` from any of ``wanted``, for ``timeout_s``; ``what`` it is for, in words.

        Raises LostError when any worker is lost or fails meanwhile, BadInputError with what a user can put right.
        """
        deadline = self._clock() + timeout_s
        if self._clock() - self._looked >= TICK_S:  # answers of one worker must not hide that another one stands still
            self._look()
        while True:
            for member in wanted:
                for message in member.inbox:
                    if isinstance(message, kind):
                        member.inbox.remove(message)
                        return message
            for member in wanted:
                if member in self.lost:
                    raise self.lost[member]
            left = max(0.0, deadline - self._clock())
            if not self._read(min(left, TICK_S)):
                if not left:
                    raise self.late(wanted, what)
                self._look()

    def _look(self) -> None:
        self._looked = self._clock()
        self.meanwhile()

    def late(self, members: Sequence[Member], what: str) -> LostError:
        """For the caller to raise: ``members`` have not done ``what`` in time. They may do so yet."""
        return LostError(f"{', '.join(m.name for m in members)} took too long {what}", members)

    def has_news(self, member: Member) -> bool:
        """Whether the member has sent something that nobody has taken yet."""
        return bool(member.inbox or self._heard([member.link], 0.0))

    def arrived(self, kind: type[T]) -> list[tuple[Member, T]]:
        """Every ``kind`` that has come, and whose it is, without waiting. Raises as ``wait_for``."""
        while self._read(0.0):
            pass
        messages = [(m, message) for m in self._members for message in m.inbox if isinstance(message, kind)]
        for member, message in messages:
            member.inbox.remove(message)
        return messages

    def said(self, kind: type[T]) -> list[T]:
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
            self._look()

    def _read(self, timeout_s: float) -> bool:
        """One message of each worker that has sent some, into its inbox. Whether there was any."""
        ready = self._ready(timeout_s)
        for member in ready:
            self._take(member, self._receive(member))
        return bool(ready)

    def _take(self, member: Member, message: Any) -> None:
        if not self._is_old(message):
            whole = member.parts.add(message) if isinstance(message, StepDone) else message
            if whole is not None:
                member.inbox.append(whole)

    def _is_old(self, message: Any) -> bool:
        return getattr(message, "view", self.view) < self.view and not isinstance(message, self._still_heard)

    def _ready(self, timeout_s: float) -> list[Member]:
        """The members that have sent something. Raises as ``_heard``."""
        listened = {id(m.link): m for m in self._members if m not in self.lost}
        return [listened[id(link)] for link in self._heard([m.link for m in listened.values()], timeout_s)]

    def _heard(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Those that have sent something. Raises WorkerError where another thread has ended the workers."""
        try:
            return self._links.wait(links, timeout_s)
        except ValueError:
            raise WorkerError("the workers have been ended") from None

    def _receive(self, member: Member) -> Any:
        message = self._next_of(member)
        if isinstance(message, Failed):
            raise self._failed(member, message)
        if isinstance(message, Broken) and not self._is_old(message):
            raise self._broken(member, message)
        return message

    def _next_of(self, member: Member) -> Any:
        """The message that has begun to come. Raises as ``wait_for``."""
        try:
            return member.link.recv(timeout_s=REST_S)
        except LinkClosedError:
            raise self._gone(member) from None
        except TimeoutError:
            raise self._lose(member, f"{member.name} stands still in the midst of a message", ended=True) from None

    def _broken(self, member: Member, message: Broken) -> Exception:
        """One of its channels has ended: whoever was at the other end is lost. Where all live, it is itself: it has
        nothing that cannot be had again. A memory worker that is at the other end twice in AGAIN_S is lost, though.
        """
        if self.lost:  # a lost member has ended channels of others
            return next(iter(self.lost.values()))
        if message.lacks:
            return self._lacking(member, message)
        others = {id(m.link): m for m in self._members if m is not member and m not in self.lost}
        deadline = self._clock() + CAUSE_S
        while (left := deadline - self._clock()) > 0.0:
            for link in self._heard([m.link for m in others.values()], left):
                other = others[id(link)]
                try:
                    said = self._next_of(other)
                except (LostError, BadInputError) as cause:
                    return cause
                if isinstance(said, Failed):
                    return self._failed(other, said)
                if isinstance(said, Broken) and said.lacks and not self._is_old(said):
                    return self._lacking(other, said)  # and has ended its channels
                self._take(other, said)
        named = next((m for m in self.memory if message.peer and self.names.get(m.handle) == message.peer), None)
        if named and self._clock() - self._named.get(named, -AGAIN_S) < AGAIN_S:
            named.unreached = True
            return self._lose(named, f"others have lost their way to {named.name} twice: {message.text}", ended=True)
        if named:
            self._named = {m: at for m, at in self._named.items() if m in self.memory} | {named: self._clock()}
        return self._lose(member, f"{member.name} has lost its way to others: {message.text}", ended=True)

    def _lacking(self, member: Member, message: Broken) -> LostError:
        return LostError(f"{member.name} has met what the driver did not know: {message.text}", [], ended=True)

    def _lose(self, member: Member, text: str, *, ended: bool = False) -> LostError:
        return self.lost.setdefault(member, LostError(text, [member], ended=ended or member.on_loan))

    def _failed(self, member: Member, message: Failed) -> Exception:
        if message.user_error and not member.on_loan:
            return BadInputError(message.text)
        # A worker often fails because another one died or failed: then that one is the news.
        others = sorted(
            (m for m in self._members if m is not member and m not in self.lost), key=lambda m: m.handle.fate() is None
        )
        deadline, cause, lost = self._clock() + CAUSE_S, message, self._lose(member, message.text)
        for other in others:
            if cause.by_peer or other.handle.fate() is not None:
                said = self._failure_of(other, deadline)
                if said is not None:
                    error = self._lose(other, said.text)
                    cause, lost = (cause, lost) if said.by_peer else (said, error)
                elif other.handle.fate() is not None:  # it ended without a word
                    return self._gone(other)
        return lost

    def _failure_of(self, member: Member, deadline: float) -> Failed | None:
        """The error that ``member`` tells of its end, if it tells one before ``deadline``."""
        while True:
            try:
                message = member.link.recv(timeout_s=max(0.0, deadline - self._clock()))
            except (LinkClosedError, TimeoutError):
                return None
            if isinstance(message, Failed):
                return message
            self._take(member, message)

    def _gone(self, member: Member) -> Exception:
        if self._ends:  # by another thread, and its link with it
            return WorkerError("the workers have been ended")
        said = self._failure_of(member, self._clock() + CAUSE_S)  # it may lie unread where only sending failed
        if said is not None:
            return self._failed(member, said)
        deadline = self._clock() + FATE_S
        while member.handle.fate() is None and self._clock() < deadline:
            self._links.wait([], 0.01)  # the link ends a moment before the process can be waited for
        fate = member.handle.fate() or "closed its control link"
        return self._lose(member, f"{member.name} {fate}", ended=True)
