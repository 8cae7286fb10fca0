"""K and V that a prefill worker sends to a memory worker, and the confirmations that it gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from wiring import connect

from lamina import netstack
from lamina.netstack import Channel, ChannelTimeout
from lamina.netstack.checksum import checksum
from lamina.protocol.codec import TensorSpan
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError
from lamina.workers.memory.kv_transfer.transfer import TransferRefusedError
from lamina.workers.memory.kv_transfer.transfer_link import MessageType, pack_header
from lamina.workers.prefill.kv_sender import KvSender
from lamina.workers.runtime import Runtime

SOON_S = 30.0


class Ends:
    """A sender, and the raw channel of the memory worker."""

    def __init__(self, own: Channel, peer: Channel, timeout_s: float) -> None:
        self.now, self.peer = [100.0], peer
        self.sender = KvSender(own, 0, timeout_s, number=1, around=Runtime(clock=lambda: self.now[0]))

    def confirm(self, step: int, data: bytes = b"", said: bytes | None = None) -> None:
        slot = self.peer.reserve(len(data), timeout_s=SOON_S)
        slot.data[:] = data
        self.peer.put_signal(slot, pack_header(MessageType.PART, 0, step, checksum(data) if said is None else said))

    def sent(self) -> tuple[bytes, bytes]:
        """The header and the data of the next message."""
        arrival = self.peer.wait_signal(timeout_s=SOON_S)
        both = bytes(arrival.tag), bytes(arrival.data)
        self.peer.release(arrival)
        return both


@contextmanager
def ends(timeout_s: float = 1.0) -> Iterator[Ends]:
    fabric = netstack.open("loopback", key=b"k" * 32)
    yield Ends(*connect(fabric), timeout_s)
    fabric.close()


@pytest.fixture
def pair() -> Iterator[Ends]:
    with ends() as pair:
        yield pair


def header(step: int, index: int, data: bytes) -> bytes:
    return pack_header(MessageType.PART, index, step, checksum(data))


def test_layers_of_a_step_are_the_parts_of_its_transfer(pair: Ends) -> None:
    rows = torch.arange(12, dtype=torch.float32).view(3, 4)
    span = TensorSpan(0, 6, (3, 2))
    for step, layer in ((5, 2), (5, 3), (6, 2)):
        key = MessageKey(MessageKind.KV, step, epoch=1, layer=layer)
        pair.sender.send_tensors(key, 24, [(rows[:, layer - 2 : layer], span)])
    both, first = (rows[:, i : i + 2].contiguous().numpy().tobytes() for i in (1, 0))
    assert pair.sent() == (header(5, 0, first), first)
    assert pair.sent() == (header(5, 1, both), both)
    assert pair.sent() == (header(6, 0, first), first)


def test_other_messages_keep_their_keys(pair: Ends) -> None:
    key = MessageKey(MessageKind.JOIN)
    pair.sender.send(key, b"hello")
    tag, data = pair.sent()
    assert (MessageKey.unpack(tag), data) == (key, b"hello")


def test_steps_are_stored_in_order(pair: Ends) -> None:
    assert not pair.sender.wait_until_stored(3, 0.0)
    pair.confirm(3)
    pair.confirm(4)
    for step in (3, 3, 4):
        assert pair.sender.wait_until_stored(step, SOON_S)


def test_a_memory_worker_that_stores_nothing_is_named_after_the_limit(pair: Ends) -> None:
    assert not pair.sender.wait_until_stored(3, 0.0)
    pair.now[0] += 1.0
    assert not pair.sender.wait_until_stored(3, 0.0), "not before the limit"
    pair.now[0] += 0.1
    with pytest.raises(ChannelTimeout, match="memory worker 1 did not store K and V in 1 s"):
        pair.sender.wait_until_stored(3, 0.0)


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ((3, b"", bytes(16)), "part 0 of transfer 3 is damaged"),
        ((3, b"more"), "part 0 of transfer 3 with 4 bytes, not part 0 of 0"),
        ((4,), "part 0 of transfer 4 came, and is not expected"),
    ],
    ids=str,
)
def test_a_confirmation_that_cannot_be_is_an_error(lie: tuple[int, bytes, bytes], error: str) -> None:
    with ends(timeout_s=0.01) as pair:
        pair.confirm(*lie)
        with pytest.raises(ProtocolError, match=error):
            pair.sender.wait_until_stored(3, SOON_S)


def test_a_refused_confirmation_is_an_error_and_no_wait_without_end(pair: Ends) -> None:
    reason = b"no room"
    slot = pair.peer.reserve(len(reason), timeout_s=SOON_S)
    slot.data[:] = reason
    pair.peer.put_signal(slot, pack_header(MessageType.REFUSED, 0, 5, checksum(reason)))
    with pytest.raises(TransferRefusedError, match="no room .transfer 5 of memory worker 1"):
        pair.sender.wait_until_stored(5, SOON_S)
