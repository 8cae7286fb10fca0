"""A channel's struct in device memory and its inboxes, in the layout of csrc/netstack/device.h."""

from __future__ import annotations

from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.struct_layout import StructLayout
from lamina.netstack.host import native_module

from .driver import Driver

ENDS = StructLayout(*native_module.channel_layout())


def stride(geometry: Geometry) -> int:
    """Return the bytes of a slot, header included."""
    return native_module.slot_stride(geometry.slot_bytes)


def inbox_bytes(geometry: Geometry) -> int:
    return native_module.inbox_bytes(geometry.slots, geometry.slot_bytes)


def ends_of(
    staging: int, inbox: int, abort: int, outbound: Geometry | None, inbound: Geometry | None, zero: int
) -> dict[str, int]:
    """Return the initial struct of a channel without messages, for any kind of link. Addresses are those of the peer's
    inbox as this side writes it, of this side's inbox, and of the abort word. ``zero``: the epoch's first number. A
    direction without a geometry has no slots.
    """
    shapes = dict[str, int]()
    for way, geometry in (("out", outbound), ("in", inbound)):
        if geometry is not None:
            shapes |= {f"{way}.count": geometry.slots, f"{way}.bytes": geometry.slot_bytes}
    return {"staging": staging, "inbox": inbox, "abort": abort, "zero": zero} | shapes


def new_ends(
    staging: int, inbox: int, abort: int, outbound: Geometry, inbound: Geometry, zero: int, *, near: bool = False
) -> bytes:
    """Return the struct of a channel whose link is memory that both sides map; see ``ends_of``. ``near``: both are
    kernels of one context, and the memory is its GPU's.
    """
    return ENDS.pack(ends_of(staging, inbox, abort, outbound, inbound, zero) | {"near": near})


def clear_inbox(driver: Driver, address: int, zero: int) -> None:
    """Write the state that both sides need before the first message: no signal and no credit of the epoch yet."""
    driver.call("cuMemsetD8_v2", address, 0, native_module.SLOTS_AT)
    for at in (native_module.SIGNAL_AT, native_module.CREDIT_AT, native_module.BULK_CREDIT_AT):
        driver.write(address + at, zero.to_bytes(8, "little"))
