"""Shared memory between processes of one host and one user: the sender writes straight into the receiver's inbox.

Peers meet on an abstract-namespace Unix socket (unix(7)), so no file appears anywhere. After the handshake the
listening side makes one memfd for both directions, seals its size and passes the descriptor. The kernel frees it with
the last mapping, even if processes are killed. The socket stays open, silent, as the life line: its end is the peer's
end. Layout, waiting and the checks of a peer's writes: csrc/netstack/host/ring.h and link.h.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
from functools import partial
from time import monotonic

from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Hello, offer, run
from lamina.netstack.bootstrap.listener import StreamListener, Visit
from lamina.netstack.bootstrap.sockets import dial, open_place
from lamina.netstack.contract.base import SPIN_S, BaseFabric, usable_spin
from lamina.netstack.contract.channel_terms import DEFAULT_LISTEN_TERMS, ListenTerms, Terms
from lamina.netstack.contract.fabric import CONNECT_S, Channel, ChannelTimeout, Fabric, HandshakeError

from .native_module import open_link, ring_bytes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_UCRED = struct.Struct("iII")  # pid, uid, gid


class ShmFabric(BaseFabric):
    """``spin_s``: how long a wait spins before it sleeps; not at all on a host with one CPU."""

    scheme = "shm"

    def __init__(self, key: bytes, *, spin_s: float = SPIN_S) -> None:
        super().__init__(key)
        self.spin_s = usable_spin(spin_s)

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> StreamListener:
        place = address or f"lamina-{secrets.token_hex(8)}"
        url = f"{self.scheme}://{place}"
        sock = open_place(socket.AF_UNIX, f"\0{place}", url, "name")
        listener = StreamListener(
            sock, url, self._key, self.scheme, screen=_check_user, welcome=partial(self._welcome, url),
            reception=reception,
        )  # fmt: skip
        self._opened.add(listener)
        return listener

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> Channel:
        deadline = monotonic() + timeout_s
        place = self._address(url)
        hello = Hello(**vars(terms), scheme=self.scheme)
        sock = dial(socket.AF_UNIX, f"\0{place}", url, timeout_s)
        try:
            _check_user(sock)
            return self._meet(
                sock, url, run(sock, offer(terms.key or self._key, hello), url, deadline=deadline), deadline
            )
        except BaseException:
            sock.close()
            raise

    def _meet(self, sock: socket.socket, url: str, terms: AuthenticatedTerms, deadline: float) -> Channel:
        memory = _receive_memory(sock, url, terms, deadline)
        try:
            return self._channel(memory, sock, terms, listening=False, peer=url)
        finally:
            os.close(memory)

    def _welcome(self, url: str, sock: socket.socket, terms: AuthenticatedTerms) -> Channel | Visit:
        pid, _, _ = _credentials(sock)
        memory = os.memfd_create("lamina", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, _memory_bytes(terms))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            peer = f"{url} (process {pid})"
            channel = self._channel(memory, sock.dup(), terms, listening=True, peer=peer)
            with sock:  # the channel has prepared the memory, and has a descriptor of its own
                socket.send_fds(sock, [b"M"], [memory])
            return channel
        finally:
            os.close(memory)

    def _channel(self, memory: int, life_line: socket.socket, terms: Terms, *, listening: bool, peer: str) -> Channel:
        """Return a channel, which owns ``life_line`` from here on; ``memory`` stays the caller's."""
        outbound, inbound = terms.outbound, terms.inbound
        if listening:
            outbound, inbound = inbound, outbound
        line = life_line.fileno()
        far = terms.peer_name(listening=listening)
        channel = open_link(memory, line, listening, terms.epoch, outbound, inbound, self.spin_s, peer, far)
        life_line.detach()
        self._opened.add(channel)
        return channel


def _memory_bytes(terms: Terms) -> int:
    return sum(ring_bytes(geometry.slots, geometry.slot_bytes) for geometry in (terms.outbound, terms.inbound))


def _receive_memory(sock: socket.socket, url: str, terms: Terms, deadline: float) -> int:
    """Return the descriptor of the shared memory; checked, because its size must never change under the mapping."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(max(0.0, deadline - monotonic()) * 1000):
        raise ChannelTimeout(f"{url}: connect: the listener sent no memory in time")
    try:
        _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        fds = []
    if not fds:
        raise HandshakeError(f"{url}: connect: the listener has no memory for {terms.outbound} and {terms.inbound}")
    memory = fds[0]
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if seals & _SEALS != _SEALS or os.fstat(memory).st_size != _memory_bytes(terms):
        os.close(memory)
        raise HandshakeError(f"{url}: connect: the listener sent memory of another size or without seals")
    return memory


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def _check_user(sock: socket.socket) -> None:
    _, uid, _ = _credentials(sock)
    if uid != os.geteuid():
        raise HandshakeError(f"the peer belongs to user {uid}, we are user {os.geteuid()}")


def open_fabric(key: bytes) -> Fabric:
    return ShmFabric(key)
