"""The RDMA ports of this machine as its kernel lists them in /sys, and the one that was named. Changes nothing. Needs
neither pyverbs nor a device, so it can name what a host without them lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path

from lamina.netstack.contract.base import NAMED_BY
from lamina.netstack.contract.rdma_device_name import Wanted as Wanted
from lamina.netstack.kernel_files import names, text

from .traffic_class import MEMBERS, PARTITION

Gids = dict[int, tuple[str, str]]  # index -> the address and its kind
CLASS = "sys/class/infiniband"
NONE = f"none in /{CLASS}; load the NIC's driver (mlx5_ib), or rdma_rxe for Soft-RoCE"
ROUTABLE = "RoCE v2"  # its packets are UDP
KINDS = {0: "IB/RoCE v1", 1: "IB/RoCE v1", 2: ROUTABLE}  # the kernel's names, by ibv_gid_type
MOST_NAMED = 8  # GIDs in one line; a ConnectX has space for 256


@dataclass(frozen=True)
class Port:
    """``link``: "Ethernet" or "InfiniBand"; ``gids``: by index, the address and its kind, as "RoCE v2"."""

    device: str
    number: int
    state: str
    link: str
    is_iwarp: bool = False
    gids: Gids = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        return f"{self.device}:{self.number} {self.state or 'state unknown'}"

    def fits(self, wanted: Wanted) -> bool:
        return wanted.name in ("", self.device) and wanted.port in (None, self.number) and not self.why_unusable(wanted)

    def gid_index(self, wanted: Wanted) -> int:
        """Return the index of the wanted GID, else of the best one: RoCE v2 before others, routable before link-local.
        Call it only if ``why_unusable`` returns "".
        """
        if wanted.gid_index is not None:
            return wanted.gid_index

        def worth(index: int) -> tuple[bool, bool, int]:
            gid, kind = self.gids[index]
            return kind == ROUTABLE, not IPv6Address(gid).is_link_local, -index

        return max(self.gids, key=worth)

    def why_unusable(self, wanted: Wanted) -> str:
        """Return why queue pairs cannot use it, with the fix after a semicolon; "" if they can."""
        place = f"{self.device}:{self.number}"
        if self.is_iwarp:
            return f"{place} speaks iWARP, no InfiniBand and no RoCE; name another device, or take --transport tcp"
        if not self.is_active:
            return f"{place} is {self.state or 'in no known state'}; connect it, or: ip link set DEVICE up"
        if not self.gids:
            return f"{place} has no GID; set an IP address on its network device, and switch RoCE on in its driver"
        if wanted.gid_index is not None and wanted.gid_index not in self.gids:
            return f"{place} has no GID {wanted.gid_index}; choose from {gid_names(self.gids)}"
        return ""


def gid_names(gids: Gids) -> str:
    """Return the first GIDs, in words."""
    words = [f"{n} ({' '.join(filter(None, (kind, gid)))})" for n, (gid, kind) in sorted(gids.items())]
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return ", ".join(words[:MOST_NAMED]) + more


def ports(root: Path = Path("/"), gids: Callable[[str, int], Gids] | None = None) -> list[Port]:
    """Return all ports that the kernel below ``root`` lists, sorted by device and number. ``gids``: returns the GIDs of
    a device's port, if there is a faster way than reading a file for each.
    """
    folder = root / CLASS
    return [_port(folder / device, n, gids) for device in names(folder) for n in _numbers(folder / device / "ports")]


def partition_index(port: Port, key: int | None, root: Path = Path("/")) -> int:
    """Return the index of the partition's key in the table of ``port``, a full member's rather than a limited one's; 0
    for None. Raises ValueError, which names those that it has.
    """
    if key is None:
        return 0
    folder = root / CLASS / port.device / "ports" / str(port.number) / "pkeys"
    keys = {index: int(text(folder / str(index)) or "0", 16) for index in _numbers(folder)}
    same = [index for index, there in keys.items() if there & MEMBERS == key & MEMBERS]
    if not same:
        known = ", ".join(sorted({f"{there:#06x}" for there in keys.values() if there})) or "none"
        raise ValueError(f"{port.device}:{port.number} is in no partition {key:#06x} ({PARTITION}); it is in {known}")
    return max(same, key=lambda index: (keys[index], -index))


def why_no_port(local_ports: list[Port], named: str) -> str:
    """Return why no port serves ``named`` (of --rdma-device, "": any), with a fix after a semicolon; "" if one does."""
    try:
        wanted = Wanted.parse(named)
    except ValueError as error:
        return str(error)
    of_name = [p for p in local_ports if wanted.name in ("", p.device)]
    if not of_name:
        there = ", ".join(sorted({p.device for p in local_ports})) or "none"
        return f"{NAMED_BY} names {wanted.name!r}, which is not here; choose from {there}"
    matching = [p for p in of_name if wanted.port in (None, p.number)]
    if not matching:
        return f"{NAMED_BY} names port {wanted.port}, which is not here; choose from {', '.join(map(str, of_name))}"
    lacks = [p.why_unusable(wanted) for p in matching]
    return "" if "" in lacks else lacks[0]


def _port(device: Path, number: int, gids: Callable[[str, int], Gids] | None) -> Port:
    folder = device / "ports" / str(number)
    state = text(folder / "state").partition(": ")[2]
    is_iwarp = text(device / "node_type").endswith("RNIC")
    there = gids(device.name, number) if gids else _gids(folder)
    return Port(device.name, number, state, text(folder / "link_layer"), is_iwarp, there)


def _gids(folder: Path) -> Gids:
    there = {}
    for index in _numbers(folder / "gids"):
        try:
            gid = IPv6Address(text(folder / "gids" / str(index)))
        except ValueError:
            continue
        if int(gid):
            there[index] = str(gid), text(folder / "gid_attrs/types" / str(index))  # "" of one that is not set
    return there


def _numbers(folder: Path) -> list[int]:
    return sorted(int(n) for n in names(folder) if n.isdigit())
