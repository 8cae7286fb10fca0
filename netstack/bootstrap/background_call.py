"""A slow call on a thread of its own, while a listener serves other peers."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Generic, TypeVar

from .handshake import Wants

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A running call, for which the process's end does not wait. ``result``: what it returns or raises. Raises OSError
    if this host has no thread or no descriptor for it.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self.result = Future[T]()
        self._over, over = os.pipe()  # the thread's end closes with the thread, even if the caller is gone

        def run() -> None:
            try:
                self.result.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it belongs to the result
                self.result.set_exception(error)
            finally:
                os.close(over)

        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError as error:
            os.close(over)
            self.close()
            raise OSError(f"no thread for {name}: {error}") from error

    def fileno(self) -> int:
        """A descriptor that is readable once there is a result."""
        return self._over

    def close(self) -> None:
        """Close the descriptor; the call continues."""
        os.close(self._over)


def run_in_background(call: Callable[[], T], name: str) -> Generator[Wants, None, T]:
    """Return or raise the result of ``call``, run as a BackgroundCall. If the generator is closed, the result is
    dropped.
    """
    made = BackgroundCall(call, name)
    try:
        while not made.result.done():
            yield {made.fileno(): select.POLLIN}
        return made.result.result()
    finally:
        made.close()


def has_disconnected(sock: socket.socket) -> bool:
    """Return True if the peer has disconnected, even if some of its bytes are unread."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
