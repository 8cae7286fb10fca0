"""K, V and recurrent states that a prefill worker sends to one memory worker: each step is a transfer, which the other
end confirms.
"""

from __future__ import annotations

from collections.abc import Callable

from lamina.netstack import Channel, ChannelTimeout
from lamina.observe.trace import NULL_RECORDER, Recorder
from lamina.protocol.step_plan import MessageKey, MessageKind
from lamina.workers.compute.attention_client import MemoryWorkerClient
from lamina.workers.device_selection import CPU
from lamina.workers.memory.kv_transfer.transfer import Transfer, TransferPart
from lamina.workers.memory.kv_transfer.transfer_link import NOTHING, TransferLink
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.staging import HostStaging

HOST = HostStaging(CPU)  # K and V are in host memory when they are sent


class KvSender(MemoryWorkerClient):
    """A MemoryWorkerClient whose messages of K, V and states are the parts of transfers. One thread uses it."""

    def __init__(
        self,
        channel: Channel,
        worker: int,
        timeout_s: float,
        trace: Recorder = NULL_RECORDER,
        number: int | None = None,
        around: Runtime = RUNTIME,
    ) -> None:
        super().__init__(channel, worker, timeout_s, trace, number)
        self._link = TransferLink(f"memory worker {self.number}", timeout_s, around=around)
        self._link.attach(channel)
        self._step = self._part = -1  # sent last
        self._stored: Transfer | None = None  # the confirmation of the step that is waited for

    def put(self, key: MessageKey, nbytes: int, fill: Callable[[memoryview], object]) -> None:
        """Send a message of ``nbytes``, which ``fill`` writes into the peer's inbox."""
        if key.kind not in (MessageKind.KV, MessageKind.MIXED):
            super().put(key, nbytes, fill)
            return
        self._step, self._part = key.step, self._part + 1 if key.step == self._step else 0
        part = TransferPart(nbytes, lambda data, staging: fill(data), key.layer)
        self._link.send_part(self._step, self._part, part, HOST)

    def wait_until_stored(self, step: int, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until the memory worker has stored a step, and return whether it has. Steps
        are waited for in order. Raises ChannelTimeout if it takes too long, TransferError if the
        memory worker refuses, other ChannelErrors, ProtocolError.
        """
        if self._stored is None or self._stored.number != step:
            self._stored = self._link.expect(Transfer(step, (NOTHING,), self.timeout_s))
        while self._stored.next_part is not None:
            if self._stored.error is not None:
                raise self._stored.error
            try:
                if not self._link.receive_one(HOST, timeout_s):
                    return False
            except ChannelTimeout:
                error = f"memory worker {self.number} did not store K and V in {self.timeout_s:g} s"
                raise ChannelTimeout(error) from None
        return True
