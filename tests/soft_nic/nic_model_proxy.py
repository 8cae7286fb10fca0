"""``nic-model`` as it is for a GPU that may not map doorbells: it builds work requests, and a CPU thread rings for it.

HARDWARE-UNVERIFIED, as ``nic-model`` is. It rings in ordinary memory, which the thread polls
(csrc/netstack/proxy/proxy.h).
"""

from __future__ import annotations

from lamina.netstack.contract.fabric import Fabric

from .nic_model import NicModelFabric


class NicModelProxyFabric(NicModelFabric):
    scheme = "nic-model-proxy"
    proxied = True


def open_fabric(key: bytes) -> Fabric:
    """Open a software NIC for peers that hold ``key``."""
    return NicModelProxyFabric(key)
