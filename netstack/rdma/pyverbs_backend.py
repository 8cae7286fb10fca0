"""The provider of ``verbs`` if the native one was not built: Python posts, through pyverbs."""

from __future__ import annotations

import socket

from lamina.netstack.bootstrap.handshake import AuthenticatedTerms
from lamina.netstack.bootstrap.listener import Meeting

from .device import RdmaDevice
from .verbs_channel import WRITE_BYTES, VerbsChannel


class PyverbsProvider:
    """``wanted``: of --rdma-device."""

    def __init__(self, wanted: str, spin_s: float) -> None:
        self._spin_s = spin_s
        self._device = RdmaDevice(wanted, least_message_bytes=WRITE_BYTES)
        self.remarks = self._device.remarks

    def meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        made = VerbsChannel(self._device, sock, peer, session, listening=listening, spin_s=self._spin_s)
        return (yield from made.meeting())

    def close(self) -> None:
        self._device.close()
