"""A channel's struct in device memory and its inboxes, laid out as csrc/netstack/device.h says."""

from __future__ import annotations

from lamina.netstack.contract.layout import StructLayout
from lamina.netstack.contract.terms import Geometry
from lamina.netstack.host import native

ENDS = StructLayout(*native.channel_layout())


def stride(geometry: Geometry) -> int:
    """Bytes of a slot, header included."""
    return native.slot_stride(geometry.slot_bytes)


def inbox_bytes(geometry: Geometry) -> int:
    return native.inbox_bytes(geometry.slots, geometry.slot_bytes)


def new_ends(staging: int, inbox: int, abort: int, outbound: Geometry, inbound: Geometry, zero: int) -> bytes:
    """The struct of a channel without messages: addresses of the peer's inbox as mapped here, of ours, of the abort
    word; ``zero``: the epoch's first number.
    """
    shapes = {"out.count": outbound.slots, "out.bytes": outbound.slot_bytes}
    shapes |= {"in.count": inbound.slots, "in.bytes": inbound.slot_bytes}
    return ENDS.pack({"staging": staging, "inbox": inbox, "abort": abort, "zero": zero} | shapes)
