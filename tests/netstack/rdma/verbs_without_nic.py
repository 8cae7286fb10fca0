"""A plugin of pytest: the transport verbs of this process has fake_verbs.cpp, at FAKE_VERBS, for libibverbs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from lamina.netstack.rdma import native_backend
from lamina.netstack.rdma.rdma_ports import Gids, Port

FAKE = ctypes.CDLL(os.environ["FAKE_VERBS"])  # whose name the engine then finds in place of the system's
PORT = Port("fake0", 1, "ACTIVE", "Ethernet", gids={0: ("fe80::1", "RoCE v2"), 1: ("fe80::2", "RoCE v2")})


def ports(*, gids: Callable[[str, int], Gids] | None = None) -> list[Port]:
    return [PORT]


native_backend.ports = ports  # type: ignore[assignment]
