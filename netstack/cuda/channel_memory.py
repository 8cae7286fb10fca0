"""A channel's struct in device memory and its inboxes, laid out as csrc/netstack/device.h says."""

from __future__ import annotations

from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.struct_layout import StructLayout
from lamina.netstack.host import native_module

from .driver import Driver

ENDS = StructLayout(*native_module.channel_layout())


def stride(geometry: Geometry) -> int:
    """Bytes of a slot, header included."""
    return native_module.slot_stride(geometry.slot_bytes)


def inbox_bytes(geometry: Geometry) -> int:
    return native_module.inbox_bytes(geometry.slots, geometry.slot_bytes)


def ends_of(
    staging: int, inbox: int, abort: int, outbound: Geometry | None, inbound: Geometry | None, zero: int
) -> dict[str, int]:
    """What a channel without messages begins with, of any kind of link: addresses of the peer's inbox as it is written
    here, of ours, of the abort word; ``zero``: the epoch's first number. A direction without a geometry has no slots.
    """
    shapes = dict[str, int]()
    for way, geometry in (("out", outbound), ("in", inbound)):
        if geometry is not None:
            shapes |= {f"{way}.count": geometry.slots, f"{way}.bytes": geometry.slot_bytes}
    return {"staging": staging, "inbox": inbox, "abort": abort, "zero": zero} | shapes


def new_ends(
    staging: int, inbox: int, abort: int, outbound: Geometry, inbound: Geometry, zero: int, *, near: bool = False
) -> bytes:
    """The struct of a channel whose link is memory that both sides map; see ``ends_of``. ``near``: both are kernels of
    one context, and the memory is its GPU's.
    """
    return ENDS.pack(ends_of(staging, inbox, abort, outbound, inbound, zero) | {"near": near})


def clear_inbox(driver: Driver, address: int, zero: int) -> None:
    """As both sides have to find it before the first message: no signal and no credit of the epoch yet."""
    driver.call("cuMemsetD8_v2", address, 0, native_module.SLOTS_AT)
    for at in (native_module.SIGNAL_AT, native_module.CREDIT_AT, native_module.BULK_CREDIT_AT):
        driver.write(address + at, zero.to_bytes(8, "little"))
