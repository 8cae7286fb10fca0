"""The bridges of PCIe above a device, as /sys shows them, and whether they redirect traffic between devices. Changes
nothing.
"""

from __future__ import annotations

from pathlib import Path

from lamina.netstack.kernel_files import text

BRIDGE = "0x0604"  # class of a bridge from PCI to PCI
EXTENDED_AT, MOST_CAPABILITIES = 0x100, 960  # of the configuration space, beyond which only root can read
# PCI Express Base Specification, "ACS Extended Capability": its number, and the offset of its control word.
ACS, CONTROL_AT = 0x000D, 6
REDIRECTS = 0x4 | 0x8  # bits of that word: requests, and completions, to peers go by the root complex


def bridges_above(device: Path) -> list[Path]:
    """Return the bridges from a device to the root. ``device``: its folder in /sys."""
    return [folder for folder in device.resolve().parents if text(folder / "class").startswith(BRIDGE)]


def redirects(bridge: Path) -> bool | None:
    """Return True if ``bridge`` sends traffic between devices below it up to the CPU; None: only root can read it."""
    try:
        space = (bridge / "config").read_bytes()
    except OSError:
        return None
    if len(space) <= EXTENDED_AT:
        return None
    at = EXTENDED_AT
    for _ in range(MOST_CAPABILITIES):
        head = int.from_bytes(space[at : at + 4], "little")
        if head & 0xFFFF == ACS:
            return bool(int.from_bytes(space[at + CONTROL_AT : at + CONTROL_AT + 2], "little") & REDIRECTS)
        at = head >> 20
        if at < EXTENDED_AT:
            return False
    return False
