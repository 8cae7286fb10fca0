"""A stand-in of pyverbs without a NIC: it keeps book of who uses which protection domain; what is posted completes.

As a program it opens two channels of the transport verbs in this process, puts a message, closes all, and prints the
book as JSON. ``argv[1]``: the number of every queue pair; ``argv[2]``: how many words a peer sends in all, as fast as
receives are posted, to channels that only wait.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from socket import htonl
from types import ModuleType, SimpleNamespace
from typing import Any

BOOK: list[dict[str, Any]] = []  # of each domain, in their order


class PyverbsError(Exception):
    pass


ENUMS: list[str] = []


class Enums(ModuleType):
    def __getattr__(self, name: str) -> int:
        if not name.startswith("IBV_"):
            raise AttributeError(name)
        if name not in ENUMS:
            ENUMS.append(name)
        return 1 << ENUMS.index(name)


class Thing(SimpleNamespace):
    """Anything that takes what it is given, and can be closed."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        super().__init__(**fields)

    def close(self) -> None:
        pass


class PD:
    def __init__(self, context: Any) -> None:
        self.book: dict[str, Any] = {"pairs": 0, "memories": [], "open": 0, "closed_with": -1}
        BOOK.append(self.book)

    def close(self) -> None:
        self.book["closed_with"] = self.book["open"]


class InDomain:
    def __init__(self, domain: PD) -> None:
        self.domain = domain
        domain.book["open"] += 1

    def close(self) -> None:
        self.domain.book["open"] -= 1


class MR(InDomain):
    def __init__(self, domain: PD, nbytes: int, access: int, address: int) -> None:
        super().__init__(domain)
        domain.book["memories"].append(nbytes)
        self.lkey = self.rkey = 1


class QP(InDomain):
    qp_num = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    words = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # that peers have yet to send

    def __init__(self, domain: PD, attributes: Any) -> None:
        super().__init__(domain)
        domain.book["pairs"] += 1
        self.queue = attributes.scq

    def post_send(self, work: Any) -> None:
        self.queue.done.append(Thing(status=enums.IBV_WC_SUCCESS, opcode=0, wr_id=work.wr_id))

    def post_recv(self, work: Any) -> None:
        """A peer that floods sends what an honest one may say: the credit that is known."""
        if QP.words:
            QP.words -= 1
            came = enums.IBV_WC_RECV_RDMA_WITH_IMM
            self.queue.done.append(Thing(status=enums.IBV_WC_SUCCESS, opcode=came, wr_id=0, imm_data=htonl(1 << 31)))

    def to_init(self, attributes: Any) -> None:
        pass

    to_rtr = to_rts = to_init


class CQ(Thing):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(done=[])

    def poll(self, most: int) -> tuple[int, list[Any]]:
        taken, self.done = self.done[:most], self.done[most:]
        return len(taken), taken

    def req_notify(self, wakers_only: bool) -> None:
        pass


class CompChannel:
    def __init__(self, context: Any) -> None:
        self.fd = os.eventfd(0)

    def get_cq_event(self, queue: CQ) -> None:
        raise PyverbsError("none")

    def close(self) -> None:
        os.close(self.fd)


class Context(Thing):
    def query_device(self) -> Any:
        return Thing(phys_port_cnt=1)

    def query_port(self, number: int) -> Any:
        link = enums.IBV_LINK_LAYER_ETHERNET
        return Thing(state=enums.IBV_PORT_ACTIVE, lid=1, active_mtu=1, max_msg_sz=1 << 30, link_layer=link)

    def query_gid_table(self, most: int) -> list[Any]:
        return [Thing(port_num=1, gid_index=0, gid_type=enums.IBV_GID_TYPE_ROCE_V2, gid_str=lambda: "fe80::1")]


class SendWR(Thing):
    def set_wr_rdma(self, key: int, address: int) -> None:
        pass


enums = Enums("pyverbs.enums")
MODULES = {
    "addr": {"GID": Thing, "AHAttr": Thing, "GlobalRoute": Thing},
    "cq": {"CQ": CQ, "CompChannel": CompChannel},
    "device": {"Context": Context, "get_device_list": lambda: [Thing(name=b"stand-in")]},
    "mr": {"MR": MR},
    "pd": {"PD": PD},
    "pyverbs_error": {"PyverbsError": PyverbsError},
    "qp": {"QP": QP, "QPAttr": Thing, "QPCap": Thing, "QPInitAttr": Thing},
    "wr": {"SGE": Thing, "RecvWR": Thing, "SendWR": SendWR},
}


def install() -> None:
    """As ``pyverbs`` of this process."""
    package = sys.modules["pyverbs"] = ModuleType("pyverbs")
    package.__path__ = []
    sys.modules["pyverbs.enums"] = enums
    package.enums = enums  # type: ignore[attr-defined]
    for name, members in MODULES.items():
        module = sys.modules[f"pyverbs.{name}"] = ModuleType(f"pyverbs.{name}")
        vars(module).update(members)


def main() -> None:
    install()
    from lamina import netstack
    from lamina.netstack.rdma.pyverbs_backend import PyverbsProvider
    from lamina.netstack.rdma.verbs import VerbsFabric

    fabric = VerbsFabric(b"k" * 32, way=PyverbsProvider("", spin_s=0.0))
    listener, inbox = fabric.listen(), netstack.Geometry(slots=1, slot_bytes=1 << 17)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            accepted = pool.submit(listener.accept, timeout_s=10.0)
            try:
                near = fabric.connect(listener.url, netstack.Terms(outbound=inbox, inbound=inbox))
            except netstack.HandshakeError:
                listener.close()  # who accepts waits for the next one
                raise
            far = accepted.result()
            if QP.words:
                wait_in_vain(near)
            else:
                near.put_signal(near.reserve(1 << 17), b"")
            far.close()
            near.close()
    fabric.close()
    print(json.dumps(BOOK))


def wait_in_vain(channel: Any) -> None:
    """While words come without end."""
    from lamina import netstack

    try:
        channel.wait_signal(timeout_s=0.05)
    except netstack.ChannelTimeout:
        if QP.words:
            return
    raise SystemExit("it took all words first")


if __name__ == "__main__":
    main()
