"""``mlx5`` where a GPU may not map the NIC's doorbells: it builds the work requests, and a CPU thread rings for it.

HARDWARE-UNVERIFIED, as ``mlx5`` is. It rings in ordinary memory, which the thread polls (csrc/netstack/proxy.h).
"""

from __future__ import annotations

from lamina.netstack.contract.fabric import Fabric

from .mlx5 import Mlx5Fabric, check_usable


class Mlx5ProxyFabric(Mlx5Fabric):
    scheme = "mlx5-proxy"
    proxied = True


def open_fabric(key: bytes) -> Fabric:
    """Raises ImportError, as ``mlx5`` does."""
    check_usable(Mlx5ProxyFabric.scheme)
    return Mlx5ProxyFabric(key)
