"""Threads of which one runs at a time: that who holds the baton. Who gets it next is drawn, and time passes only while
all wait. So a run is a function of its seed, whatever the machine does meanwhile.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lamina.tools.plan.simulator.clock import VirtualClock

FOREVER = float("inf")
GIVE_UP = 0.1  # of waits that would be none, others get the baton first
END_S = 60.0  # virtual seconds for all threads to end by themselves
HELD_S = 600.0  # of real time, for who holds the baton to give it on: other work may have all cores


class Slain(BaseException):
    """The process of this thread was killed. Not an Exception, so that no handler takes it."""


class Life(Protocol):
    """The state of a process, shared by its threads."""

    @property
    def ended(self) -> bool:
        """Returns whether it was killed."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Returns whether it stands still by a signal."""
        ...


class LongLife:
    """The state of a process that is never hit."""

    ended = is_stopped = False


class Strand:
    """A thread."""

    def __init__(self, name: str, life: Life) -> None:
        self.name, self.life = name, life
        self.turn = threading.Lock()  # free from when it is given until it is taken
        self.turn.acquire()
        self.ready: Callable[[], Any] = lambda: True
        self.until = FOREVER

    def is_due(self, now: float) -> bool:
        """Returns whether it would do something now; an error of what it waits for is its own to raise."""
        life = self.life
        if life.ended or life.is_stopped:
            return life.ended
        if self.until <= now:
            return True
        try:
            return bool(self.ready())
        except Exception:  # noqa: BLE001
            return True


class Baton:
    """The right to run: the thread that makes it holds it first, the driver's."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self.clock, self._rng = clock, rng
        self._driver = self._holder = Strand("driver", LongLife())
        self._strands = [self._driver]
        self._given = 0  # how often
        self._failures: list[BaseException] = []

    def start(self, work: Callable[[], None], name: str, life: Life) -> None:
        """A thread that gets the baton in its turn. What it raises the driver raises."""
        strand = Strand(name, life)
        self._strands.append(strand)
        threading.Thread(target=self._live, args=(strand, work), name=name, daemon=True).start()

    def wait(self, ready: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Waits until ``ready``, or until so much time has passed; returns what ``ready`` returns then, or raises. The
        holder of the baton calls it.
        """
        strand = self._holder
        self._check(strand)
        if not ready() or self._rng.random() < GIVE_UP:
            strand.ready = ready
            strand.until = FOREVER if timeout_s is None else self.clock.now + max(0.0, timeout_s)
            self._hand_on(strand)
        return ready()

    def sleep(self, seconds: float) -> None:
        """Let others go on for so long."""
        self.wait(lambda: False, seconds)

    def end(self) -> None:
        """End all threads but the driver's: a thread that does not end by itself ends as if it were killed. Raises a
        thread's error, and AssertionError where threads had to be ended.
        """
        self.wait(lambda: len(self._strands) == 1, END_S)
        left = [strand.name for strand in self._strands[1:]]
        self.cut()
        assert not left, f"threads that do not end: {', '.join(left)}"

    def cut(self) -> None:
        """End all threads but the driver's as if they were killed."""
        for strand in self._strands[1:]:
            strand.life = _Over()
        self._driver.ready, self._driver.until = lambda: len(self._strands) == 1, FOREVER
        while len(self._strands) > 1:
            self._failures.clear()
            self._hand_on(self._driver, check=False)

    def _live(self, strand: Strand, work: Callable[[], None]) -> None:
        try:
            self._await(strand)
            if not strand.life.ended:
                work()
        except Slain:
            pass
        except BaseException as error:  # noqa: BLE001
            self._failures.append(error)
        finally:
            self._strands.remove(strand)
            if self._holder is strand:
                self._give(self._next())

    def _hand_on(self, strand: Strand, *, check: bool = True) -> None:
        """Give the baton on, and take it again."""
        other = self._next()
        if other is not strand:
            self._give(other)
            self._await(strand)
        if check:
            self._check(strand)

    def _give(self, strand: Strand) -> None:
        self._holder, self._given = strand, self._given + 1
        strand.turn.release()

    def _await(self, strand: Strand) -> None:
        """The turn of a thread.

        Where no thread gives the baton on any more, the driver says which holds it; others end.
        """
        given = self._given
        while not strand.turn.acquire(timeout=HELD_S):
            if given == self._given and strand is self._driver:
                raise AssertionError(
                    f"{self._holder.name} waits for what is none of the simulation's, or goes on and on"
                )
            if given == self._given:
                raise Slain
            given = self._given

    def _check(self, strand: Strand) -> None:
        if strand.life.ended:
            raise Slain
        if strand is self._driver and self._failures:
            raise self._failures[0]

    def _next(self) -> Strand:
        """Returns the thread that has something to do; time passes until one has."""
        while True:
            if self._failures:
                return self._driver
            now = self.clock.now
            if due := [strand for strand in self._strands if strand.is_due(now)]:
                return self._rng.choice(due)
            until = min(strand.until for strand in self._strands if not strand.life.is_stopped)
            if not self.clock.advance(until) and until == FOREVER:
                waiting = ", ".join(strand.name for strand in self._strands)
                self._failures.append(AssertionError(f"nothing will ever happen any more: {waiting} wait"))


class _Over:
    ended, is_stopped = True, False


class BatonCondition(threading.Condition):
    """The condition of the baton's holder: it guards nothing, as no other thread runs."""

    def __init__(self, baton: Baton) -> None:
        self._baton, self._told = baton, 0

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *error: object) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until another thread has notified since."""
        told = self._told
        return bool(self._baton.wait(lambda: self._told != told, timeout))

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Waits until ``predicate``; returns its value then."""
        return self._baton.wait(predicate, timeout)

    def notify_all(self) -> None:
        """Something has changed."""
        self._told += 1


class BatonQueue:
    """Messages from one thread to another."""

    def __init__(self, baton: Baton) -> None:
        self._baton, self._messages = baton, deque[Any]()

    def put(self, message: Any) -> None:
        self._messages.append(message)

    def get(self, block: bool = True) -> Any:
        """The next one. Raises queue.Empty where there is none and no caller waits for it."""
        self._baton.wait(lambda: self._messages, None if block else 0.0)
        if not self._messages:
            raise queue.Empty
        return self._messages.popleft()
