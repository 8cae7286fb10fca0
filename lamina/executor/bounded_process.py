"""A process that answers questions within bounds of time and memory, and that another one replaces if it breaks them.

Its parent ends it at the deadline. So code of a model's directory, or a library, can neither keep nor fill the parent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from lamina.models.model_files import one_line
from lamina.protocol.control import MAX_FRAME, ControlLink, LinkBrokenError, LinkClosedError, LinkStalledError

from .launchers.local import ProcessWorker

START_S = 120.0  # for the process to import what it needs, on a busy machine
END_S = 1.0  # for a process whose link has ended to be gone


class EndedWords(NamedTuple):
    """The parent's words: ``what`` runs there; errors for a question that takes too long or too much memory, that
    cannot be sent, and that comes after the end.
    """

    what: str
    too_long: str
    too_large: str
    unsendable: str
    closed: str


class BoundedProcess:
    """Owns a process of one role, which starts with the first question. Safe from any thread; questions are answered
    one after another.
    """

    def __init__(self, role: str, replies: Any, words: EndedWords, most_bytes: int = MAX_FRAME) -> None:
        """``replies``: the union of the process's messages, of which the first says that it is ready; each has at most
        ``most_bytes``.
        """
        self._role, self._replies, self._words, self._most_bytes = role, replies, words, most_bytes
        self._lock = threading.Lock()  # held while a question is answered
        self._process: ProcessWorker | None = None
        self._link: ControlLink | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process; None if there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process, also while it works. Idempotent."""
        self._is_closed = True
        process, link = self._process, self._link
        if process is not None and link is not None:
            link.close()
            process.join(0.0)

    def ask(
        self, question: msgspec.Struct, limit_s: float, first: Callable[[], Sequence[msgspec.Struct]] = list
    ) -> Any:
        """Return the reply to ``question``. A new process gets what ``first`` returns before it. Raises ValueError if
        the process exceeds a limit or ends, OSError if none starts.
        """
        with self._lock:
            try:
                return self._reply(question, limit_s, first)
            except (UnicodeEncodeError, OverflowError) as error:  # before any of it was sent
                raise ValueError(f"{self._words.unsendable}: {one_line(error)}") from error
            except LinkClosedError as error:
                raise ValueError(self._why_ended(error)) from error
            except TimeoutError as error:
                self._end()
                raise ValueError(self._words.too_long) from error
            except BaseException:  # the reply is still to come
                self._end()
                raise

    def _reply(self, question: msgspec.Struct, limit_s: float, first: Callable[[], Sequence[msgspec.Struct]]) -> Any:
        """Return the reply of the running process; of a new one, if that had ended before it read the question."""
        was_running = self._process is not None
        try:
            return self._exchange(question, limit_s, first)
        except LinkClosedError as error:
            if not (was_running and isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)):
                raise
        self._end(wait_s=END_S)
        return self._exchange(question, limit_s, first)

    def _exchange(self, question: msgspec.Struct, limit_s: float, first: Callable[[], Sequence[msgspec.Struct]]) -> Any:
        link = self._running(first)
        link.limit_sends(limit_s)
        link.send(question)
        return link.recv(limit_s)

    def end(self) -> None:
        """End the process, whose heap may keep what it took. The next question starts another one."""
        with self._lock:
            self._end()

    def _running(self, first: Callable[[], Sequence[msgspec.Struct]]) -> ControlLink:
        """Return the link of the process, a new one if the last has ended. Raises ValueError after ``close``."""
        if self._process is not None and self._process.exit_reason() is not None:
            self._end()
        if self._process is None or self._link is None:
            self._process = ProcessWorker(self._role, 0)
            self._link = ControlLink(self._process.sock, self._replies, most_bytes=self._most_bytes)
            try:
                self._link.recv(START_S)
                for message in first():
                    self._link.send(message)
            except (LinkClosedError, TimeoutError) as error:
                why = self._process.exit_reason() or f"has not started in {START_S:g} s"
                self._end()
                raise OSError(f"the {self._role} process {why}") from error
        if self._is_closed:
            self._end()
            raise ValueError(self._words.closed)
        return self._link

    def _why_ended(self, error: LinkClosedError) -> str:
        """End the process, whose link has ended, and return the reason."""
        process = self._process
        self._end(wait_s=END_S)
        if isinstance(error, LinkStalledError) or (process is not None and process.status == -signal.SIGXCPU):
            return self._words.too_long
        if isinstance(error, LinkBrokenError):
            return self._words.too_large
        return f"{self._words.what} has ended its process, which {process and process.exit_reason()}"

    def _end(self, wait_s: float = 0.0) -> None:
        process, link = self._process, self._link
        if link is not None:
            link.close()
        if process is not None:
            process.join(wait_s)
        self._process = self._link = None
