"""One RDMA device, registered memory and reliable queue pairs, through pyverbs (libibverbs), which only this module
imports.

pyverbs sets devices up for ``verbs`` if the native engine was not built, and for tests of ``verbs``. Every refusal of
the device is an OSError here, with the cause and, if there is one, the fix.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address
from mmap import MADV_DONTFORK, mmap
from pathlib import Path
from secrets import randbits
from socket import htonl, ntohl
from typing import Any, NamedTuple

import numpy as np

from lamina.netstack.contract.base import NAMED_BY

from .card import QueuePairAddress
from .mtu import PacketSizeLog, remarks_on
from .rdma_ports import Port, Wanted, partition_index
from .traffic_class import check_level, service

try:
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR

    try:
        import pyverbs.enums as e
    except ImportError:
        import pyverbs.libibverbs_enums as e  # its name since rdma-core 57
except ImportError as error:
    raise ImportError(
        f"transport 'verbs' needs pyverbs, which did not load ({error}); install the distribution's package "
        "python3-pyverbs (PyPI's does not fit the distribution's libibverbs) and let this Python see it: "
        "`python -m venv --system-site-packages`, or its folder in PYTHONPATH"
    ) from error

# The most that fits. Soft-RoCE takes it for "for ever", so waits have a time limit of their own. With less, Soft-RoCE
# breaks if 2 % of packets are lost: every loss costs a retry until an acknowledgement comes, one for 64 packets.
RETRIES = 7
NOT_READY_RETRIES = 6  # receives are posted for all that an honest peer sends, so none is ever needed
CQE_BATCH = 32
GID_ENTRIES = 2000  # their bytes must fit the 16-bit length of the kernel's interface
GID_SCORE = {e.IBV_GID_TYPE_ROCE_V2: 2, e.IBV_GID_TYPE_ROCE_V1: 0}
LINKS = {e.IBV_LINK_LAYER_ETHERNET: "Ethernet"}
FLUSHED = e.IBV_WC_WR_FLUSH_ERR
STATUS = {
    FLUSHED: "the queue pair was already broken",
    e.IBV_WC_LOC_PROT_ERR: "local memory is not registered",
    e.IBV_WC_REM_ACCESS_ERR: "the peer's memory is not open to us there",
    e.IBV_WC_REM_INV_REQ_ERR: "the peer's NIC refused the request",
    e.IBV_WC_RETRY_EXC_ERR: "the peer's NIC does not answer",
    e.IBV_WC_RNR_RETRY_EXC_ERR: "the peer has no receive posted",
}


class Completion(NamedTuple):
    """``immediate`` is 32 bits that the peer chose; None for a request of this side."""

    error: str  # empty if it succeeded
    request: int  # the number it was posted with
    immediate: int | None


@contextmanager
def _told(what: str, fix: str = "") -> Iterator[None]:
    try:
        yield
    except PyverbsError as error:
        raise OSError(f"cannot {what}: {error}{fix}") from error


class RdmaDevice:
    """An open device with one active port. Raises ImportError if this host has none that fits ``wanted``."""

    def __init__(self, wanted: str = "", *, least_message_bytes: int = 0) -> None:
        try:
            named, self.service = Wanted.parse(wanted), service()
        except ValueError as error:
            raise ImportError(f"transport 'verbs': {error}") from error
        tried = []
        for candidate in _device_names():
            if named.name in ("", candidate):
                try:
                    self._open(candidate, named)
                    if self.message_bytes >= least_message_bytes:
                        return
                    tried.append(f"{candidate}: messages of at most {self.message_bytes} bytes")
                except (OSError, ValueError, PyverbsError) as error:
                    tried.append(f"{candidate}: {error}")
        which = f"named {wanted!r} ({NAMED_BY}) " if wanted else ""
        why = "; ".join(tried) or "rdma-core lists none; see `rdma link` and `ibv_devices`"
        raise ImportError(f"transport 'verbs' finds no RDMA device {which}with an active port: {why}")

    def _open(self, name: str, wanted: Wanted) -> None:
        self.name = name
        self.context = Context(name=name)
        attributes = self.context.query_device()
        for number in [wanted.port] if wanted.port else range(1, attributes.phys_port_cnt + 1):
            state = self.context.query_port(number)
            if state.state == e.IBV_PORT_ACTIVE:
                self.port = number
                break
        else:
            raise ValueError("no active port")
        entries = [g for g in self.context.query_gid_table(GID_ENTRIES) if g.port_num == self.port]
        there = ", ".join(str(g.gid_index) for g in entries) or "none: set an IP address on its network device"
        if wanted.gid_index is not None:
            entries = [g for g in entries if g.gid_index == wanted.gid_index]
        if not entries:
            which = "" if wanted.gid_index is None else f" {wanted.gid_index}"
            raise ValueError(f"port {self.port} has no GID{which}; it has {there}")
        best = max(entries, key=lambda g: (GID_SCORE.get(g.gid_type, 1), _is_routable(g), -g.gid_index))
        self.gid_index = best.gid_index
        self.gid = IPv6Address(best.gid_str()).packed
        check_level(self.service.level, f"{name}:{self.port}", LINKS.get(state.link_layer, ""))
        here = Port(name, self.port, "ACTIVE", "")
        self.partition = partition_index(here, self.service.partition)
        self.lid, self.mtu, self.message_bytes = state.lid, state.active_mtu, state.max_msg_sz
        self.remarks, self.packets = remarks_on(f"{name}:{self.port}", self.lid, self.mtu), PacketSizeLog()

    def close(self) -> None:
        self.context.close()


class Domain:
    """The memory that one peer's queue pair may access on this side: keys of another domain's memory are useless there.
    Owns its memories.
    """

    def __init__(self, device: RdmaDevice) -> None:
        self.device = device
        self._memories: list[Memory] = []
        with _told(f"make a protection domain on {device.name}"):
            self.protection = PD(device.context)

    def memory(self, view: memoryview, *, inbox: bool = False) -> Memory:
        """Register ``view``. Raises OSError."""
        self._memories.append(Memory(self, view, inbox=inbox))
        return self._memories[-1]

    def close(self) -> None:
        """Free the memories; close the queue pair first."""
        for memory in self._memories:
            memory.close()
        self.protection.close()


class Memory:
    """Registered memory. A peer may write to an inbox only, and may read nothing."""

    def __init__(self, domain: Domain, view: memoryview, *, inbox: bool = False) -> None:
        self.view = view
        self.address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE if inbox else 0
        name = domain.device.name
        with _told(f"register {view.nbytes} bytes with {name}", "; is `ulimit -l` (locked memory) too low?"):
            self._region = MR(domain.protection, view.nbytes, access, address=self.address)
        self.lkey, self.rkey = self._region.lkey, self._region.rkey

    def close(self) -> None:
        self._region.close()


def pages(nbytes: int) -> memoryview:
    """Return zeroed memory for a NIC: a fork must not move the pages that it writes to."""
    memory = mmap(-1, nbytes)
    memory.madvise(MADV_DONTFORK)
    return memoryview(memory)


class QueuePair:
    """A reliable connection: RDMA writes, some with an immediate that completes a receive of the peer. ``sends``,
    ``receives``: most requests of a kind that are posted and not yet polled.
    """

    def __init__(self, domain: Domain, sends: int, receives: int) -> None:
        self._device = device = domain.device
        with _told(f"make a queue pair of {sends} + {receives} requests on {device.name}"):
            self._events, self.events_fd = _completion_channel(device.context)
            os.set_blocking(self.events_fd, False)
            self._queue = CQ(device.context, sends + receives, channel=self._events)
            room = QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
            kind = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room)
            self._pair = QP(domain.protection, kind)
            self._receive = RecvWR(num_sge=1, sg=[SGE(0, 0, 0)])
            self._receive.num_sge = 0  # the constructor insists on one
            attributes = QPAttr(port_num=device.port)
            attributes.pkey_index = device.partition
            attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
            self._pair.to_init(attributes)
            for _ in range(receives):
                self.post_receive()
        self.route = QueuePairAddress(device.gid, device.lid, self._pair.qp_num, randbits(24), device.mtu)

    def connect(self, peer: QueuePairAddress) -> None:
        """Connect the queue pair to the peer's. Both directions work as soon as the peer has done the same."""
        way = GlobalRoute(dgid=GID(IPv6Address(peer.gid).exploded), sgid_index=self._device.gid_index, hop_limit=64)
        way.traffic_class = self._device.service.traffic_class
        attributes = QPAttr(port_num=self._device.port)
        attributes.ah_attr = AHAttr(port_num=self._device.port, is_global=1, gr=way, dlid=peer.lid)
        attributes.ah_attr.sl = self._device.service.level
        attributes.path_mtu = min(self.route.mtu, peer.mtu)
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.number, peer.psn, self.route.psn
        attributes.min_rnr_timer, attributes.rnr_retry = 12, NOT_READY_RETRIES
        attributes.timeout, attributes.retry_cnt = self._device.service.timeout, RETRIES
        with _told(f"connect to the peer's queue pair from {self._device.name} port {self._device.port}"):
            self._pair.to_rtr(attributes)
            self._pair.to_rts(attributes)

    def post_receive(self) -> None:
        """Allow one more immediate of the peer."""
        with _told("post a receive"):
            self._pair.post_recv(self._receive)

    def write(
        self,
        request: int,
        piece: tuple[Memory, int, int] | None,
        to: tuple[int, int],
        immediate: int | None = None,
        *,
        wake: bool = False,
    ) -> None:
        """Post one RDMA write of ``piece`` (memory, address, bytes; None: no bytes) to the peer's (key, address). It
        completes as ``request``. ``wake``: its immediate wakes a peer that waits for such only.
        """
        flags = e.IBV_SEND_SIGNALED
        if wake:
            flags |= e.IBV_SEND_SOLICITED
        memory, address, nbytes = piece or (None, 0, 0)
        element = SGE(address, nbytes, memory.lkey if memory else 0)
        work = SendWR(wr_id=request, num_sge=1, sg=[element], send_flags=flags)
        work.num_sge = int(piece is not None)
        work.opcode = e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        work.imm_data = htonl(immediate or 0)
        work.set_wr_rdma(*to)
        with _told("post a write"):
            self._pair.post_send(work)

    def poll(self) -> list[Completion]:
        """Return the work requests that have completed since the last poll."""
        with _told("poll the completion queue"):
            _, completions = self._queue.poll(CQE_BATCH)
        return [_completion(c) for c in completions]

    def arm(self, *, wakers_only: bool) -> None:
        """Make ``events_fd`` readable with the next completion (of a write with ``wake``, if ``wakers_only``)."""
        with _told("arm the completion queue"):
            self._queue.req_notify(wakers_only)

    def disarm(self) -> bool:
        """Take the event off ``events_fd``. Returns True if there was one."""
        try:
            self._events.get_cq_event(self._queue)  # acknowledged by pyverbs when the queue is closed
        except PyverbsError:
            return False
        return True

    def close(self) -> None:
        for resource in (self._pair, self._queue, self._events):
            resource.close()


def _completion(c: Any) -> Completion:
    error = "" if c.status == e.IBV_WC_SUCCESS else STATUS.get(c.status, f"status {c.status} of the NIC")
    came = not error and c.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM
    return Completion(error, c.wr_id, ntohl(c.imm_data) if came else None)


def _device_names() -> list[str]:
    try:
        return [device.name.decode() for device in get_device_list()]
    except PyverbsError:  # the kernel has no RDMA at all
        return []


def _is_routable(entry: Any) -> bool:
    return not IPv6Address(entry.gid_str()).is_link_local


def _completion_channel(context: Any) -> tuple[Any, int]:
    """Return a completion channel and its descriptor, which pyverbs reports only since rdma-core 57. Before, it is the
    one event descriptor that has appeared meanwhile; if another thread opened one too, it tries again.
    """
    for _ in range(100):
        before = _event_descriptors()
        channel = CompChannel(context)
        if hasattr(channel, "fd"):
            return channel, channel.fd
        new = _event_descriptors() - before
        if len(new) == 1:
            return channel, new.pop()
        channel.close()
    raise OSError("cannot tell the descriptor of a completion channel: other threads keep opening some")


def _event_descriptors() -> set[int]:
    descriptors = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in os.readlink(link):
                descriptors.add(int(link.name))
        except OSError:
            continue  # closed meanwhile
    return descriptors
