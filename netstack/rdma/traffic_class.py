"""The operator's settings for how the network treats our queue pairs' packets: needed if RoCE shares its switches.

Switches keep a class of traffic free of loss by the DSCP of its packets (RoCE) or by its service level (InfiniBand).
Packets of no such class are dropped under load and sent again. Members of an InfiniBand partition hear each other only.
A packet without acknowledgement is sent again after a time, seven times. Networks that fail for longer, as while a
switch starts, need a longer time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TRAFFIC_CLASS, SERVICE_LEVEL = "LAMINA_RDMA_TRAFFIC_CLASS", "LAMINA_RDMA_SERVICE_LEVEL"
PARTITION, TIMEOUT = "LAMINA_RDMA_PARTITION", "LAMINA_RDMA_TIMEOUT"
# A byte of the IP header, 4 bits of InfiniBand's, and 5 bits, where 0 is for ever (InfiniBand 1.4, 9.7.6.1.3).
NUMBERS = {TRAFFIC_CLASS: range(256), SERVICE_LEVEL: range(16), TIMEOUT: range(1, 32)}
OF_ROCE = range(8)  # service levels: the priority in a frame's tag has 3 bits (IEEE 802.1Q), NICs drop the fourth
USUAL_TIMEOUT = 14
MEMBERS = 0x7FFF  # keys of members of a partition agree in these bits
SUCH_AS = {
    TRAFFIC_CLASS: "106, which is DSCP 26 and ECN on",
    SERVICE_LEVEL: "3",
    TIMEOUT: f"{USUAL_TIMEOUT}, which is 67 ms (4.096 us * 2**{USUAL_TIMEOUT})",
}


@dataclass(frozen=True)
class NetworkService:
    """``partition``: the key of InfiniBand's partition, 15 bits and its membership; None: the port's first.
    ``timeout``: a packet is sent again after 4.096 us * 2**timeout.
    """

    traffic_class: int = 0
    level: int = 0
    partition: int | None = None
    timeout: int = USUAL_TIMEOUT


def service(environ: Mapping[str, str] = os.environ) -> NetworkService:
    """Return the settings in ``environ``, with defaults for missing ones. Raises ValueError, one line that names the
    variable.
    """
    traffic_class, level = _number(environ, TRAFFIC_CLASS), _number(environ, SERVICE_LEVEL)
    return NetworkService(traffic_class, level, _partition(environ), _number(environ, TIMEOUT, USUAL_TIMEOUT))


def check_level(level: int, place: str, link: str) -> None:
    """Raises ValueError if packets of the port ``place`` cannot have the service ``level``; ``link``: as in Port."""
    if link == "Ethernet" and level not in OF_ROCE:
        known = f"{OF_ROCE[0]} to {OF_ROCE[-1]}"
        raise ValueError(
            f"{place} is RoCE, whose packets carry 3 bits of priority: {SERVICE_LEVEL} is {known} there, not {level}"
        )


def _number(environ: Mapping[str, str], name: str, usual: int = 0) -> int:
    text, numbers = environ.get(name, "").strip(), NUMBERS[name]
    if not text:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) in numbers):
        known = f"{numbers[0]} to {numbers[-1]}"
        raise ValueError(f"{name} is a number from {known}, such as {SUCH_AS[name]}; not {text!r}")
    return int(text)


def _partition(environ: Mapping[str, str]) -> int | None:
    text = environ.get(PARTITION, "").strip().lower()
    if not text:
        return None
    if not re.fullmatch("0x[0-9a-f]{1,4}", text) or not int(text, 16) & MEMBERS:
        raise ValueError(f"{PARTITION} is a key of a partition, such as 0x8001; not {text!r}")
    return int(text, 16)
