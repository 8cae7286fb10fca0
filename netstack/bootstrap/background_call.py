"""A call that takes its time, on a thread of its own, while a listener goes on with others."""

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
    """``call`` has begun, and nobody waits for it at the end of the process. ``result``: what it returns or raises.

    Raises OSError where this host has no thread or no descriptor for it.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self.result = Future[T]()
        self._over, over = os.pipe()  # the thread's end goes with the thread, whoever has given up meanwhile

        def run() -> None:
            try:
                self.result.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is the result's
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
        """Readable once there is a result."""
        return self._over

    def close(self) -> None:
        """The call goes on."""
        os.close(self._over)


def run_in_background(call: Callable[[], T], name: str) -> Generator[Wants, None, T]:
    """What ``call`` returns or raises, as BackgroundCall makes it. Where nobody waits any more it is dropped."""
    made = BackgroundCall(call, name)
    try:
        while not made.result.done():
            yield {made.fileno(): select.POLLIN}
        return made.result.result()
    finally:
        made.close()


def has_disconnected(sock: socket.socket) -> bool:
    """Whether the peer has, whatever of its words is still unread."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
