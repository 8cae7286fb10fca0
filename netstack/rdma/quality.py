"""How the network is to treat what our queue pairs send, by the operator's word: needed where RoCE shares its switches.

Switches keep a class of traffic free of loss by the DSCP of its packets (RoCE) or by its service level (InfiniBand);
what belongs to no such class is dropped under load and sent again. Members of an InfiniBand partition hear each other
alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TRAFFIC_CLASS, SERVICE_LEVEL = "LAMINA_RDMA_TRAFFIC_CLASS", "LAMINA_RDMA_SERVICE_LEVEL"
PARTITION = "LAMINA_RDMA_PARTITION"
MOST = {TRAFFIC_CLASS: 255, SERVICE_LEVEL: 15}  # a byte of the IP header; 4 bits of InfiniBand's
MEMBERS = 0x7FFF  # of a partition have keys that agree in these bits
SUCH_AS = {TRAFFIC_CLASS: "106, which is DSCP 26 and ECN on", SERVICE_LEVEL: "3"}


@dataclass(frozen=True)
class NetworkService:
    """``partition``: the key of InfiniBand's partition, 15 bits and its membership; None: the port's first."""

    traffic_class: int = 0
    level: int = 0
    partition: int | None = None


def service(environ: Mapping[str, str] = os.environ) -> NetworkService:
    """What ``environ`` says; 0 where it says nothing. Raises ValueError, one line that names the variable."""
    return NetworkService(_number(environ, TRAFFIC_CLASS), _number(environ, SERVICE_LEVEL), _partition(environ))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= MOST[name]):
        raise ValueError(f"{name} is a number from 0 to {MOST[name]}, such as {SUCH_AS[name]}; not {text!r}")
    return int(text)


def _partition(environ: Mapping[str, str]) -> int | None:
    text = environ.get(PARTITION, "").strip().lower()
    if not text:
        return None
    if not re.fullmatch("0x[0-9a-f]{1,4}", text) or not int(text, 16) & MEMBERS:
        raise ValueError(f"{PARTITION} is a key of a partition, such as 0x8001; not {text!r}")
    return int(text, 16)
