"""An RDMA device with its port and GID, opened by pyverbs (libibverbs), which only this module imports.

Messages of ``verbs`` need no Python and no pyverbs: csrc/netstack/verbs opens the same port. This module sets devices
up where that engine is not built, for ``doctor``, and for peers in tests that post what no engine would.
"""

from __future__ import annotations

from ipaddress import IPv6Address

from lamina.netstack.contract.rdma_device_name import Wanted

from .rdma_ports import KINDS, NONE, Gids, ports, why_no_port

try:
    from pyverbs.device import Context
    from pyverbs.pyverbs_error import PyverbsError
except ImportError as error:
    raise ImportError(
        f"pyverbs did not load ({error}); install the distribution's package python3-pyverbs (PyPI's does not fit the "
        "distribution's libibverbs) and let this Python see it: `python -m venv --system-site-packages`, or its folder "
        "in PYTHONPATH"
    ) from error

GID_ENTRIES = 2000  # their bytes must fit the 16-bit length of the kernel's interface


class RdmaDevice:
    """An open device. Raises ImportError if this host has no port that fits ``wanted``, of --rdma-device."""

    def __init__(self, wanted: str = "") -> None:
        try:
            there = ports(gids=gids_of)
            if why := why_no_port(there, wanted) if there else NONE:
                raise ImportError(f"pyverbs finds no RDMA port: {why}")
            named = Wanted.parse(wanted)
            port = next(port for port in there if port.fits(named))
            self.context = Context(name=port.device)
            state = self.context.query_port(port.number)
        except PyverbsError as error:
            raise ImportError(f"pyverbs cannot open an RDMA device: {error}") from error
        self.name, self.port, self.lid, self.mtu = port.device, port.number, state.lid, state.active_mtu
        self.gid_index = port.gid_index(named)
        self.gid = IPv6Address(port.gids[self.gid_index][0]).packed

    def __str__(self) -> str:
        return f"{self.name}:{self.port}:{self.gid_index} ({IPv6Address(self.gid)})"

    def close(self) -> None:
        self.context.close()


def gids_of(device: str, port: int) -> Gids:
    """Return the GIDs of a port by libibverbs. Raises PyverbsError."""
    with Context(name=device) as context:
        table = context.query_gid_table(GID_ENTRIES)
    there = (entry for entry in table if entry.port_num == port)
    return {entry.gid_index: (str(IPv6Address(entry.gid_str())), KINDS.get(entry.gid_type, "")) for entry in there}
