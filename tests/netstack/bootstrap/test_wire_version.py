"""Peers of another version are refused by name only if a change of the wire format also changes VERSION."""

from __future__ import annotations

from hashlib import sha256

from lamina.netstack.bootstrap import card_exchange, handshake, self_test
from lamina.netstack.cuda import cuda
from lamina.netstack.gin import gin
from lamina.netstack.host import native_module
from lamina.netstack.mlx5 import laned_card as mlx5_card
from lamina.netstack.mlx5.mlx5 import Mlx5Fabric
from lamina.netstack.rdma import card
from lamina.netstack.rdma.verbs import VerbsFabric

# What peers of a version say to each other, of all transports whose bytes Python lays out or C++ tells of. A second
# queue of mlx5 once came without a new version, and peers of before waited for each other's cards until time was over.
DIGESTS = {5: "0b843a8f4ef25616"}


def card_of(number: int) -> card.ConnectionCard:
    return card.ConnectionCard(card.QueuePairAddress(bytes(range(16)), 1, number, 2, 3), 4, 5, 6)


def said() -> list[object]:
    """Frames and cards as bytes or formats, of one lane and of two; sizes and places of what NICs and kernels write."""
    lanes = card_of(17), card_of(18)
    return [
        handshake.MAGIC, handshake.HELLO.format, handshake.CHALLENGE.format, sorted(handshake.REFUSALS), handshake.SEAL,
        card_exchange.READY, card_of(17).pack(), *(mlx5_card.LanedCard(lanes[:n]).pack() for n in (1, 2)),
        gin.CARD.format, gin.MAGIC, gin.MADE, cuda.CARD.format, cuda.MAGIC,
        self_test.SELF_TEST_TAG, self_test.SIZES, self_test.THERE, self_test.BACK,
        [[means.__name__ for means in kind.self_test_paths] for kind in (VerbsFabric, Mlx5Fabric)],
        native_module.SIGNAL_AT, native_module.CREDIT_AT, native_module.BULK_CREDIT_AT, native_module.SLOTS_AT,
        native_module.check(1, 2, bytes(range(200))),
        [(native_module.slot_stride(n), native_module.inbox_bytes(3, n)) for n in (1, 64, 1000)],
    ]  # fmt: skip


def test_what_goes_over_the_wire_is_that_of_this_version() -> None:
    digest = sha256(repr(said()).encode()).hexdigest()[:16]
    assert DIGESTS.get(handshake.VERSION) == digest, (
        "the wire has changed: raise VERSION in netstack/bootstrap/handshake.py, and write its digest here"
    )


def test_a_version_is_one_wire() -> None:
    assert max(DIGESTS) == handshake.VERSION
    assert len(set(DIGESTS.values())) == len(DIGESTS)
