"""Transfers of KV between two workers, over one channel: parts in order, each with a checksum.

Both ends know a transfer by its number, and know its parts. The sender copies KV into the message of each part, and the
receiver copies it out. Which KV that is, and how it is transformed, is the concern of the parts alone. Messages stay in
the channel until their transfer is expected. Those of a transfer that was cancelled are dropped.

A link has two threads of its own, or its owner decides when it receives a message and when it sends a part.

There is one way to give up: the channel is aborted, and every transfer of the link fails with a TransferError. A worker
that lacks requested KV refuses that transfer alone.
"""

from __future__ import annotations

import enum
import logging
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch

from lamina.netstack import Arrival, Channel, ChannelError, ChannelTimeout, Geometry
from lamina.netstack.checksum import CHECKSUM_BYTES, checksum
from lamina.protocol.step_plan import ProtocolError
from lamina.workers.device_selection import CPU
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.staging import Staging, open_staging

from .transfer import ALL_LAYERS, Transfer, TransferGoneError, TransferPart, TransferRefusedError, TransferTable

log = logging.getLogger(__name__)
SLOTS, PART_BYTES = 4, 1 << 20  # slots of an inbox; bytes of a part, unless a block is larger
POLL_S = 1.0  # seconds of a wait for the next message, at most, before a check for a silent peer
CONNECT_TIMEOUT_S = 5.0  # seconds that a transfer to a peer waits for its channel
END_S = 0.5  # seconds for the threads of a link that is stopped
MAX_REQUESTS = 16  # requests of a peer that wait for their replies, at most
_HEADER = struct.Struct(f"<IIQ{CHECKSUM_BYTES}s")  # MessageType, number of the part, number of the transfer, checksum


class MessageType(enum.IntEnum):
    PART = 1
    REQUEST = 2  # the transfer that the peer is to send, in a form of the link's users
    REFUSED = 3  # the reason, as text
    GONE = 4  # as REFUSED: nothing of what the transfer was to send is stored


_REFUSALS = {MessageType.REFUSED: TransferRefusedError, MessageType.GONE: TransferGoneError}


class TransferLink:
    """The transfers between this worker and one peer in an epoch, in both directions. One thread receives messages, and
    another one sends them; without threads, the owner calls ``receive_one`` and ``send_part``.
    """

    def __init__(
        self,
        peer: str,
        silence_s: float,
        device: torch.device = CPU,
        answer: Callable[[bytes], Iterable[TransferPart]] | None = None,
        around: Runtime = RUNTIME,
        connect_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """``peer``: its name. ``silence_s``: seconds that a peer may be silent while it has to send or to receive.
        ``device``: of the KV. ``answer``: returns what a request wants, on the thread that sends. Raises ProtocolError
        for a request that is not valid, TransferRefusedError if this worker lacks the KV. ``connect_s``: seconds that a
        message waits for the channel.
        """
        self.peer, self._silence_s, self._device, self._answer = peer, silence_s, device, answer
        self._runtime, self._clock, self._connect_s = around, around.clock, connect_s
        self._changed = around.condition()  # also protects the memory into which parts are copied
        self._channel: Channel | None = None
        self._incoming = TransferTable(self._changed, peer)
        self._outgoing = TransferTable(self._changed, peer)
        self._num_requests = 0  # of the peer, that wait for their replies
        self._error = ""
        self._is_over = self._sends = False
        self._heard = -math.inf  # when the last message came
        self._jobs = around.queue()  # items are calls that send; None ends the thread
        self._num_threads = 0

    def attach(self, channel: Channel) -> bool:
        """Use ``channel``, which has connected, from now on. It is aborted if there is another one, or was to be, and
        after a stop; then this returns False.
        """
        with self._changed:
            is_late = self._channel is not None or bool(self._error) or self._is_over
            if not is_late:
                self._channel = channel
            self._changed.notify_all()
        if is_late:
            channel.abort(f"{self.peer} connects late, or again")
        return not is_late

    def serve(self, channel: Channel) -> None:
        """Attach ``channel``, and receive on a thread of the link."""
        if self.attach(channel):
            self._start(self._receive_all, "lamina-receive", self._incoming)

    def send(self, transfer: Transfer) -> Transfer:
        """Begin to send a transfer, after earlier ones."""
        if self._outgoing.begin(transfer) and not self._enqueue(lambda staging: self._send(transfer, staging)):
            self._outgoing.fail(transfer, self._error)
        return transfer

    def expect(self, transfer: Transfer) -> Transfer:
        """Receive a transfer from now on. ``cancel`` and ``stop`` end it without ``on_end``."""
        transfer.started_at = self._clock()
        self._incoming.begin(transfer)
        return transfer

    def request(self, number: int, data: bytes) -> None:
        """Request a transfer of the peer, which is to be expected. ``data``: must fit the peer's inbox."""
        self._enqueue(lambda staging: self._put(MessageType.REQUEST, number, 0, len(data), partial(_copy_bytes, data)))

    def fetch(self, data: bytes, parts: Iterable[TransferPart], silence_s: float) -> Transfer:
        """Request a transfer and expect it. Each transfer that the peer sends begins so, on one thread."""
        number = self._incoming.last + 1
        self.request(number, data)
        return self.expect(Transfer(number, parts, silence_s))

    def reply(self, number: int, parts: Callable[[], Iterable[TransferPart]]) -> None:
        """Send a transfer that the peer expects, after earlier ones. If ``parts`` raises TransferRefusedError, on the
        thread that sends, refuse it.
        """
        self._enqueue(lambda staging: self._reply(number, parts, staging))

    @property
    def lost(self) -> str:
        """The reason why this link was given up; "" if it was not, or only after a stop."""
        with self._changed:
            return "" if self._is_over else self._error

    @property
    def is_receiving(self) -> bool:
        """True if an expected transfer has parts that are still to come."""
        return bool(self._incoming.under_way)

    def receive_one(self, staging: Staging, timeout_s: float = 0.0) -> bool:
        """Receive the next message on this thread, and return whether one has come. Raises ChannelTimeout if the peer
        was silent for too long during a transfer, other ChannelErrors, ProtocolError.
        """
        channel = self._attached_channel()
        try:
            arrival = channel.wait_signal(timeout_s=timeout_s)
        except ChannelTimeout:
            self._check_for_silence()
            return False
        self._receive(channel, arrival, staging)
        self._heard = self._clock()
        return True

    def send_part(self, number: int, index: int, part: TransferPart, staging: Staging) -> None:
        """Send part ``index`` of transfer ``number`` on this thread. Raises ChannelError."""
        self._put(MessageType.PART, number, index, part.nbytes, lambda data: part.copy(data, staging))

    def cancel(self, number: int) -> bool:
        """Drop what still comes of a transfer, and return whether it was expected. Nothing is copied any more when this
        returns.
        """
        return self._incoming.cancel(number)

    def wait(self, transfer: Transfer, layer: int = ALL_LAYERS) -> None:
        """Wait until a transfer has copied all parts up to ``layer``. Raises TransferError. The link is given up once
        no part of any transfer was copied for as long as a peer may be silent: its threads may not notice it.
        """
        silence_s = transfer.silence_s if math.isfinite(transfer.silence_s) else self._silence_s
        copied = self._num_copied
        while not self._incoming.wait(transfer, layer, silence_s + self._connect_s + POLL_S):
            before, copied = copied, self._num_copied
            if copied == before:
                self.give_up(why := f"no part was copied for {silence_s:g} s")
                self._outgoing.fail_all(why)
        if transfer.error is not None:
            raise transfer.error
        if not transfer.has_layer(layer):
            raise self._incoming.error_of(transfer, "the epoch is over")

    @property
    def _num_copied(self) -> int:
        return self._incoming.num_copied + self._outgoing.num_copied

    def give_up(self, error: str) -> None:
        """Abort the channel, and fail all transfers, also later ones. What is sent in full by now has not failed."""
        with self._changed:
            self._error = self._error or error
            if self._channel is not None:
                self._channel.abort(error)
        self._incoming.fail_all(error)  # the thread that sends fails the others

    def stop(self) -> None:
        """Copy nothing into memory from now on, and begin nothing."""
        with self._changed:
            self._is_over = True
            self._incoming.stop()
            self._outgoing.stop()
            self._changed.notify_all()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the threads of a stopped link whose channel was aborted; END_S seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_threads, END_S)

    def _start(self, work: Callable[[Staging], None], name: str, transfers: TransferTable) -> None:
        """Start a thread. ``transfers``: fail if it does, even if its staging cannot be opened."""

        def run() -> None:
            try:
                with torch.inference_mode():  # the store was made in this mode, too
                    work(open_staging(self._device))
            except Exception as e:  # any error: else a consumer would wait for ever
                if not isinstance(e, ChannelError | ProtocolError):
                    log.exception("a transfer with %s has failed", self.peer)
                self.give_up(reason := str(e) or type(e).__name__)
                transfers.fail_all(reason)
            finally:
                with self._changed:
                    self._num_threads -= 1
                    self._changed.notify_all()

        with self._changed:
            self._num_threads += 1
        self._runtime.start(run, name)

    # Send.
    def _enqueue(self, job: Callable[[Staging], None]) -> bool:
        """Let the thread that sends do a job. Returns False if the link was stopped or given up."""
        with self._changed:
            if self._is_over or self._error:
                return False
            starts, self._sends = not self._sends, True
        if starts:
            self._start(self._send_all, "lamina-send", self._outgoing)
        self._jobs.put(job)
        return True

    def _send_all(self, staging: Staging) -> None:
        while (job := self._jobs.get()) is not None:
            job(staging)

    def _send(self, transfer: Transfer, staging: Staging) -> None:
        while (part := transfer.next_part) is not None:
            self.send_part(transfer.number, transfer.index, part, staging)
            if not self._outgoing.copy_part(transfer, part.nbytes):
                return

    def _put(
        self, message: MessageType, number: int, index: int, nbytes: int, fill: Callable[[memoryview], object]
    ) -> None:
        channel = self._attached_channel()
        slot = channel.reserve(nbytes, timeout_s=self._silence_s)
        fill(slot.data)
        channel.put_signal(slot, pack_header(message, index, number, checksum(slot.data)))

    def _attached_channel(self) -> Channel:
        with self._changed:
            self._changed.wait_for(lambda: self._channel is not None or self._is_over or self._error, self._connect_s)
            if self._channel is None:
                raise ChannelTimeout(self._error or f"{self.peer} is not there")
            return self._channel

    # Receive.
    def _receive_all(self, staging: Staging) -> None:
        """Receive messages until the channel ends."""
        self._heard, poll_s = self._clock(), min(POLL_S, self._silence_s / 8)
        while True:
            self.receive_one(staging, poll_s)

    def _check_for_silence(self) -> None:
        """Raise ChannelTimeout if the peer was silent for too long during a transfer."""
        now = self._clock()
        with self._changed:
            for transfer in self._incoming.under_way.values():
                if now - max(self._heard, transfer.started_at) > transfer.silence_s:
                    raise ChannelTimeout(f"nothing has come for {transfer.silence_s:g} s")

    def _receive(self, channel: Channel, arrival: Arrival, staging: Staging) -> None:
        try:
            message, index, number, sent_checksum = _HEADER.unpack(arrival.tag)
            name = f"part {index} of transfer {number}"
            if sent_checksum != checksum(arrival.data):
                raise ProtocolError(f"{name} is damaged")
            if message == MessageType.REQUEST and (answer := self._answer) is not None:
                self._count_request()
                wanted = bytes(arrival.data)
                self._enqueue(lambda staging: self._answer_request(number, partial(answer, wanted), staging))
            elif message == MessageType.PART or message in _REFUSALS:
                self._take(name, message, index, number, arrival.data, staging)
            else:
                raise ProtocolError(f"{name} is a message of type {message}")
        finally:
            channel.release(arrival)

    def _answer_request(self, number: int, parts: Callable[[], Iterable[TransferPart]], staging: Staging) -> None:
        self._reply(number, parts, staging)
        with self._changed:
            self._num_requests -= 1

    def _reply(self, number: int, parts: Callable[[], Iterable[TransferPart]], staging: Staging) -> None:
        try:
            transfer = Transfer(number, parts())
        except TransferRefusedError as e:
            reason = str(e).encode()
            kind = MessageType.GONE if isinstance(e, TransferGoneError) else MessageType.REFUSED
            self._put(kind, number, 0, len(reason), partial(_copy_bytes, reason))
        else:
            self._send(transfer, staging)

    def _count_request(self) -> None:
        with self._changed:
            self._num_requests += 1
            if self._num_requests > MAX_REQUESTS:  # a peer that requests without end would fill the memory
                raise ProtocolError(f"{self._num_requests} requests at a time, and {MAX_REQUESTS} may wait for replies")

    def _take(self, name: str, message: int, index: int, number: int, data: memoryview, staging: Staging) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: number <= self._incoming.last or self._is_over, self._silence_s):
                raise ProtocolError(f"{name} came, and is not expected")
            transfer = self._incoming.under_way.get(number)
        if transfer is None:
            return
        if message in _REFUSALS:
            reason = bytes(data).decode(errors="replace")
            self._incoming.fail(transfer, reason, _REFUSALS[MessageType(message)])
            return
        part = transfer.next_part
        assert part is not None
        if index != transfer.index or data.nbytes != part.nbytes:
            raise ProtocolError(f"{name} with {data.nbytes} bytes, not part {transfer.index} of {part.nbytes}")

        def copy(part: TransferPart = part) -> None:
            part.copy(data, staging)
            staging.record_event()()  # others use other queues of the device

        self._incoming.copy_part(transfer, part.nbytes, copy)


NOTHING = TransferPart(0, lambda message, staging: None)  # the only part of a transfer that confirms another one


def copy_here(source: Iterable[TransferPart], target: Iterable[TransferPart], staging: Staging) -> None:
    """Copy the parts of a transfer within this worker."""
    for out, into in zip(source, target, strict=True):
        data = np.empty(out.nbytes, np.uint8).data
        out.copy(data, staging)
        into.copy(data, staging)


def parts_from(data: bytes) -> Iterator[TransferPart]:
    """Yield the parts that bring ``data``."""
    for low in range(0, len(data), PART_BYTES):
        some = data[low : low + PART_BYTES]
        yield TransferPart(len(some), partial(_copy_bytes, some))


def split_into(buffers: Iterable[bytearray | memoryview], data: bytes | bytearray | memoryview) -> None:
    """Fill the buffers with ``data``, one after another."""
    at = 0
    for view in (memoryview(buffer).cast("B") for buffer in buffers):
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes


def parts_into(data: bytearray) -> Iterator[TransferPart]:
    """Yield the parts that fill ``data``."""
    for low in range(0, len(data), PART_BYTES):
        some = memoryview(data)[low : low + PART_BYTES]
        yield TransferPart(len(some), partial(_take_bytes, some))


def inbox(block_bytes: int = 0) -> Geometry:
    """Return the inbox of a worker that receives parts. ``block_bytes``: the most bytes of a layer's block."""
    return Geometry(slots=SLOTS, slot_bytes=max(PART_BYTES, block_bytes))


def pack_header(message: int, index: int, number: int, sent_checksum: bytes) -> bytes:
    """Return the tag of a message. ``index``: of the part. ``number``: of the transfer."""
    return _HEADER.pack(message, index, number, sent_checksum)


def _copy_bytes(data: bytes, message: memoryview, staging: Staging | None = None) -> None:
    message[:] = data


def _take_bytes(into: memoryview, message: memoryview, staging: Staging) -> None:
    into[:] = message
