"""RDMA through the verbs of libibverbs: InfiniBand, RoCE and Soft-RoCE; the CPU posts the work requests.

Peers meet over TCP, authenticate, and swap cards: queue pair, inbox, key. The connection stays open, silent, as the
life line. From there on the NICs move the data:

- A message is one RDMA write into a slot of the peer's inbox, header and payload side by side, whose immediate value
  completes a receive there. The completion is the signal; verbs promise that everything which the same queue pair wrote
  before is visible by then (InfiniBand 1.4, 10.8.3), so neither adaptive routing nor relaxed ordering matters. What
  exceeds one write goes ahead of it in pieces.
- Credit rides on messages, in the header; where none goes it is an empty write whose immediate value counts the
  released slots.
- Receives are posted for every message and credit that may be under way, so no peer is ever told to come back later.
- While a call waits, an empty write now and then asks the peer's NIC whether it is still there. Ours says when it has
  tried in vain, but for Soft-RoCE, which never gives up: there a peer of whose NIC nothing is heard for a time is lost.
- Who loses its queue pair, by a failed request or by an event of its device, says so on the life line, since a peer
  that only waits has nothing to fail.

Who can do without goes first for a trial: it connects by the scheme with a question mark behind it, and a thread of
the listener's answers (bootstrap/self_test.py).

What NICs send is neither encrypted nor authenticated: use a network that strangers cannot write to. Only the inbox is
open to the peer, for writing. Each peer has a protection domain of its own, so that a key of one peer's inbox is of no
use to another.
"""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from threading import BoundedSemaphore, Lock, Thread
from time import monotonic
from weakref import WeakSet

from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, drive
from lamina.netstack.bootstrap.listener import Meeting, StreamListener, Visit
from lamina.netstack.bootstrap.self_test import (
    SELF_TEST_TAG,
    SELF_TEST_TIMEOUT_S,
    SelfTestPath,
    answer_self_test,
    by_host,
    run_self_test,
)
from lamina.netstack.contract.base import SPIN_S, rdma_device, usable_spin
from lamina.netstack.contract.channel_terms import Terms
from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric, HandshakeError, Region
from lamina.netstack.host.native_module import verbs_fault
from lamina.netstack.host.tcp import TcpFabric

from .native_backend import LibibverbsProvider
from .nic_backend import NicProvider

ASKS = "?"  # behind the scheme of who comes for a trial
MAX_SELF_TESTS = 16  # of a listener; each has a thread, and SELF_TEST_TIMEOUT_S


class VerbsFabric(TcpFabric):
    """Listens and connects as ``tcp`` does, then leaves the wire to the NIC. ``device``: of ``--rdma-device``;
    ``way``: to another one than the best.
    """

    scheme = "verbs"
    self_test_paths: tuple[SelfTestPath, ...] = (by_host,)  # of trials

    def __init__(self, key: bytes, *, device: str = "", spin_s: float = SPIN_S, way: NicProvider | None = None) -> None:
        super().__init__(key)
        self._way = way or open_provider(device, usable_spin(spin_s))
        self.remarks = self._way.remarks
        self._trials = BoundedSemaphore(MAX_SELF_TESTS)
        self._answering: WeakSet[Thread] = WeakSet()
        self._starting = Lock()  # held from a thread's start until it is among them

    def register(self, buffer: memoryview) -> Region:
        region = super().register(buffer)
        self._way.register(region.data)
        return region

    def join(self, listener: StreamListener) -> None:
        """And for trials of it."""
        super().join(listener)
        listener.add_scheme(self.scheme + ASKS, self._answer, self._must_seal)

    def self_test(self, url: str, terms: Terms, *, timeout_s: float) -> str:
        """Why messages to and from a listener that this transport has joined do not pass within SELF_TEST_TIMEOUT_S;
        empty if they do. Raises ChannelError where there is nobody to ask, ChannelTimeout where nobody accepts within
        ``timeout_s``.
        """
        asks = replace(terms, outbound=SELF_TEST_TAG, inbound=SELF_TEST_TAG, epoch=0)
        with closing(self._connect(url, asks, self.scheme + ASKS, timeout_s)) as channel:
            try:
                run_self_test(channel, SELF_TEST_TIMEOUT_S, self.self_test_paths)
            except ChannelError as error:
                return str(error)
        return ""

    def close(self) -> None:
        super().close()
        deadline = monotonic() + SELF_TEST_TIMEOUT_S
        with self._starting:
            threads = list(self._answering)
        for thread in threads:  # with its channel it ends; until then it uses what the way has open
            thread.join(max(0.0, deadline - monotonic()))
        self._way.close()

    def _connect(self, url: str, terms: Terms, scheme: str, timeout_s: float) -> Channel:
        try:
            return super()._connect(url, terms, scheme, timeout_s)
        except OSError as error:
            raise ChannelError(f"{url}: connect: {error}") from error

    def _answer(self, sock: socket.socket, session: AuthenticatedTerms) -> Visit:
        """Of a peer that comes for a trial."""
        if session.outbound != SELF_TEST_TAG or session.inbound != SELF_TEST_TAG:
            raise HandshakeError(
                f"a trial has inboxes of {SELF_TEST_TAG}, not {session.outbound} and {session.inbound}"
            )
        if not self._trials.acquire(blocking=False):
            raise HandshakeError(f"{MAX_SELF_TESTS} trials are under way, as many as may be")
        try:
            channel = yield from self._welcome(sock, session)
        except BaseException:
            self._trials.release()
            raise

        def run() -> None:
            try:
                with closing(channel):
                    answer_self_test(channel, SELF_TEST_TIMEOUT_S, self.self_test_paths)
            except ChannelError:
                pass  # the peer has heard
            finally:
                self._trials.release()

        try:
            thread = Thread(target=run, name="lamina-trial", daemon=True)
            with self._starting:
                thread.start()
                self._answering.add(thread)
        except RuntimeError as error:  # this host has no thread for it
            channel.close()
            self._trials.release()
            raise HandshakeError(f"no trial here: {error}") from error
        return None

    def _hides(self, host: str) -> bool:
        """False: nothing encrypts messages that NICs send."""
        return False

    def _welcome(self, sock: socket.socket, session: AuthenticatedTerms) -> Meeting:
        return self._meeting(sock, self._url(sock.getpeername()), session, listening=True)

    def _connected(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, deadline: float) -> Channel:
        return drive(self._meeting(sock, peer, session, listening=False), peer, deadline=deadline)

    def _meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = yield from self._way.meeting(sock, peer, session, listening=listening)
        self._opened.add(channel)
        return channel


def open_provider(device: str, spin_s: float) -> NicProvider:
    """Raises ImportError, with what is missing on this host."""
    if not (fault := verbs_fault()):
        return LibibverbsProvider(device, spin_s)
    try:
        from .pyverbs_backend import PyverbsProvider

        return PyverbsProvider(device, spin_s)
    except ImportError as error:
        raise ImportError(f"{error}; nor is there a native way: {fault}") from error


def open_fabric(key: bytes, *, device: str = "") -> Fabric:
    return VerbsFabric(key, device=rdma_device(device))
