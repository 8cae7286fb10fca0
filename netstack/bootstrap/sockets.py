"""Stream sockets on which peers meet: opened for a listener, or connected to one."""

from __future__ import annotations

import socket
from time import monotonic, sleep

from lamina.netstack.contract.fabric import ChannelError, ChannelTimeout, ChannelUnreachable

LEAST_S = 1e-3  # 0 would make a socket non-blocking
AGAIN_S = 0.01
LATER_S = 1.0  # the kernel's own limit is later: it cannot report the reason

Place = str | tuple[str, int]  # of a Unix socket, of an IP socket


def open_place(family: socket.AddressFamily, place: Place, url: str, choose: str) -> socket.socket:
    """Return a socket that listens at ``place``. Raises ChannelError; ``choose``: what to choose instead,
    for its text.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports in TIME_WAIT are free
        sock.bind(place)
        sock.listen()
    except OSError as error:
        sock.close()
        raise ChannelError(f"cannot listen at {url}: {error.strerror or error}; choose another {choose}") from error
    return sock


def dial(family: socket.AddressFamily, place: Place, url: str, timeout_s: float) -> socket.socket:
    """Return a connection to ``place``. Raises ChannelTimeout and ChannelError; for an IP socket ChannelUnreachable, as
    the listener's host accepts a connection before the listener does.
    """
    deadline = monotonic() + timeout_s
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        while True:
            left_s = deadline - monotonic()
            sock.settimeout(max(left_s, LEAST_S))
            try:
                sock.connect(place)
                return sock
            except BlockingIOError:  # a Unix socket's queue is full; the kernel reports it at once (unix(7))
                if left_s <= 0.0:
                    raise TimeoutError from None
                sleep(min(AGAIN_S, left_s))
    except TimeoutError as error:
        sock.close()
        silent = ChannelTimeout if family == socket.AF_UNIX else ChannelUnreachable
        raise silent(f"{url}: connect: the listener did not accept in time") from error
    except OSError as error:
        sock.close()
        raise ChannelError(f"{url}: connect: {error.strerror or error}; is the listener's process alive?") from error
    except BaseException:
        sock.close()
        raise


def tune(sock: socket.socket, stall_s: float) -> None:
    """Set options of TCP: small frames are not batched, and the kernel notices a host that vanished (tcp(7)),
    ``stall_s`` and LATER_S after its last packet.
    """
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: 1,
        socket.TCP_KEEPINTVL: 1,
        socket.TCP_USER_TIMEOUT: int((stall_s + LATER_S) * 1000),
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
