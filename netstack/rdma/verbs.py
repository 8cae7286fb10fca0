"""RDMA through the verbs of libibverbs: InfiniBand, RoCE and Soft-RoCE; the CPU posts the work requests.

Peers meet over TCP, authenticate, and exchange cards: queue pair, inbox, key. The connection stays open, silent, as the
life line. After that the NICs move the data:

- A message is one RDMA write into a slot of the peer's inbox, header and payload together, whose immediate value
  completes a receive there. The completion is the signal. Verbs promise that all earlier writes of the same queue pair
  are visible by then (InfiniBand 1.4, 10.8.3), so neither adaptive routing nor relaxed ordering matters. Pieces that
  exceed one write go ahead of it.
- Credit is part of messages, in the header. Without messages it is an empty write whose immediate value counts the
  released slots.
- Receives are posted for every message and credit that may be in flight, so the NIC never asks a peer to retry later.
- While a call waits, an occasional empty write tests the peer's NIC. Our NIC reports a failed test. Soft-RoCE never
  does: there a peer is lost if nothing comes from its NIC for some time.
- A side that loses its queue pair, by a failed request or an event of its device, reports it on the life line. A peer
  that only waits would not notice it.

A connector that has another transport runs a trial first. It connects by the scheme with a question mark after it, and
a thread of the listener replies (bootstrap/self_test.py).

NICs' messages are neither encrypted nor authenticated: use a network that strangers cannot write to. Only the inbox is
open to the peer, for writing. Each peer has a protection domain of its own, so that a key of one peer's inbox is
useless to another.
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
from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric, HandshakeError
from lamina.netstack.host.tcp import TcpFabric

from .native_backend import LibibverbsProvider
from .nic_backend import NicProvider

ASKS = "?"  # after the scheme of a peer that wants a trial
MAX_SELF_TESTS = 16  # of a listener; each has a thread, and SELF_TEST_TIMEOUT_S


class VerbsFabric(TcpFabric):
    """Listens and connects as ``tcp`` does, then lets the NIC move data. ``device``: of ``--rdma-device``; ``way``:
    another provider than libibverbs.
    """

    scheme = "verbs"
    self_test_paths: tuple[SelfTestPath, ...] = (by_host,)  # of trials

    def __init__(self, key: bytes, *, device: str = "", spin_s: float = SPIN_S, way: NicProvider | None = None) -> None:
        super().__init__(key)
        self._way = way or LibibverbsProvider(device, usable_spin(spin_s))
        self.remarks = self._way.remarks
        self._trials = BoundedSemaphore(MAX_SELF_TESTS)
        self._answering: WeakSet[Thread] = WeakSet()
        self._starting = Lock()  # held from a thread's start until it is in ``_answering``

    def join(self, listener: StreamListener) -> None:
        """Let peers of this transport connect to ``listener``, and run trials with it."""
        super().join(listener)
        listener.add_scheme(self.scheme + ASKS, self._answer, self._must_seal)

    def self_test(self, url: str, terms: Terms, *, timeout_s: float) -> str:
        """Return why messages to and from a listener that this transport has joined do not pass within
        SELF_TEST_TIMEOUT_S; "" if they do. Raises ChannelError if there is no listener, ChannelTimeout if it does not
        accept within ``timeout_s``.
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
        for thread in threads:  # a thread ends with its channel; until then it uses the provider's resources
            thread.join(max(0.0, deadline - monotonic()))
        self._way.close()

    def _connect(self, url: str, terms: Terms, scheme: str, timeout_s: float) -> Channel:
        try:
            return super()._connect(url, terms, scheme, timeout_s)
        except OSError as error:
            raise ChannelError(f"{url}: connect: {error}") from error

    def _answer(self, sock: socket.socket, session: AuthenticatedTerms) -> Visit:
        """Welcome a peer that wants a trial."""
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
                pass  # the peer was notified
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

    def hides(self, host: str) -> bool:
        """Return False: NICs' messages are not encrypted."""
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


def open_fabric(key: bytes, *, device: str = "") -> Fabric:
    """Open the transport. Raises ImportError, with what is missing on this host."""
    return VerbsFabric(key, device=rdma_device(device))
