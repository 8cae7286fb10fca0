"""A peer of ``verbs`` that holds the key and posts whatever it likes, by pyverbs."""

from __future__ import annotations

import socket
import struct
import time
from ipaddress import IPv6Address
from mmap import MADV_DONTFORK, mmap
from secrets import randbits

import numpy as np
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from wiring import SOON_S

from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, exchanged
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.rdma.card import ConnectionCard, QueuePairAddress
from lamina.netstack.rdma.device import RdmaDevice
from lamina.netstack.rdma.nic_backend import inbox_bytes, reaching, stride

try:
    import pyverbs.enums as e
except ImportError:
    import pyverbs.libibverbs_enums as e  # its name since rdma-core 57

HEADER = struct.Struct("<QQQ8x32s")  # of csrc/netstack/verbs/ledger.h
CREDIT = 1 << 31
REQUESTS = 16


class Liar:
    """A connected queue pair, with the key, address and bytes of its peer's inbox."""

    def __init__(self, device: RdmaDevice, sock: socket.socket, session: AuthenticatedTerms) -> None:
        self.sock, self._geometry, self._device = sock, session.outbound, device
        self.nbytes = inbox_bytes(self._geometry)
        memory = mmap(-1, self.nbytes)
        memory.madvise(MADV_DONTFORK)
        self.memory = memoryview(memory)
        self._at = int(np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0])
        self._domain = PD(device.context)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self._region = MR(self._domain, self.nbytes, access, address=self._at)
        self._queue = CQ(device.context, 2 * REQUESTS)
        room = QPCap(max_send_wr=REQUESTS, max_recv_wr=REQUESTS, max_send_sge=1, max_recv_sge=1)
        kind = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room)
        self._pair = QP(self._domain, kind)
        attributes = QPAttr(port_num=device.port)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self._pair.to_init(attributes)
        receive = RecvWR(num_sge=1, sg=[SGE(0, 0, 0)])
        receive.num_sge = 0  # the constructor insists on one
        for _ in range(REQUESTS):
            self._pair.post_recv(receive)
        self._route = QueuePairAddress(device.gid, device.lid, self._pair.qp_num, randbits(24), device.mtu)
        self.card = ConnectionCard(self._route, self.nbytes, self._region.rkey, self._at)

    def reach(self, card: ConnectionCard) -> None:
        """Connect to the peer of this card; as one that may read, too."""
        theirs, port = card.route, self._device.port
        way = GlobalRoute(dgid=GID(IPv6Address(theirs.gid).exploded), sgid_index=self._device.gid_index, hop_limit=64)
        attributes = QPAttr(port_num=port)
        attributes.ah_attr = AHAttr(port_num=port, is_global=1, gr=way, dlid=theirs.lid)
        attributes.path_mtu = min(self._route.mtu, theirs.mtu)
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = theirs.number, theirs.psn, self._route.psn
        attributes.min_rnr_timer, attributes.rnr_retry, attributes.max_rd_atomic = 12, 6, 1
        attributes.timeout, attributes.retry_cnt = 14, 7
        self._pair.to_rtr(attributes)
        self._pair.to_rts(attributes)
        self.inbox = card.key, card.address

    def message(
        self, n: int, *, seqno: int | None = None, length: int = 5, credit: int = 0, word: int | None = None
    ) -> None:
        """Write message n, from 0, as a put does but for what is given."""
        at, named = n % self._geometry.slots * stride(self._geometry), n + 1 if seqno is None else seqno
        text = HEADER.pack(named, length, credit, b"tag") + b"hello"
        key, address = self.inbox
        self.write((key, address + at), text, named & (CREDIT - 1) if word is None else word)

    def credit(self, count: int) -> None:
        self.write(self.inbox, b"", CREDIT | count)

    def write(self, to: tuple[int, int], data: bytes, word: int | None = None) -> None:
        """Write ``data`` to (key, address) of the peer's memory, with a signal if there is a ``word``."""
        work = SendWR(num_sge=1, sg=[SGE(self._at, len(data), self._region.lkey)])
        self.memory[: len(data)] = data
        work.opcode = e.IBV_WR_RDMA_WRITE
        if word is not None:
            work.opcode, work.imm_data = e.IBV_WR_RDMA_WRITE_WITH_IMM, socket.htonl(word)
        self._post(work, to)

    def read(self, nbytes: int) -> None:
        """Read the beginning of the peer's inbox."""
        work = SendWR(num_sge=1, sg=[SGE(self._at, nbytes, self._region.lkey)])
        work.opcode = e.IBV_WR_RDMA_READ
        self._post(work, self.inbox)

    def is_refused(self) -> bool:
        """Return whether the peer's NIC refused the first request that fails."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            for done in self._queue.poll(2 * REQUESTS)[1]:
                if done.status != e.IBV_WC_SUCCESS:
                    return done.status in (e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_REM_INV_REQ_ERR)
        return False

    def close(self) -> None:
        for part in (self._pair, self._queue, self._region, self._domain, self.sock):
            part.close()

    def _post(self, work: SendWR, to: tuple[int, int]) -> None:
        work.send_flags = e.IBV_SEND_SIGNALED | e.IBV_SEND_SOLICITED
        work.set_wr_rdma(*to)
        self._pair.post_send(work)


class LiarProvider:
    """A NicProvider of liars, which connect."""

    def __init__(self) -> None:
        self._device = RdmaDevice()
        self.remarks = list[str]()

    def meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        liar = Liar(self._device, sock, session)
        reach = reaching(liar.nbytes, self._device.lid, liar.reach)
        yield from exchanged(sock, exchange_cards(session, liar.card.pack(), reach, listening=listening))
        return liar  # type: ignore[return-value]

    def close(self) -> None:
        self._device.close()
