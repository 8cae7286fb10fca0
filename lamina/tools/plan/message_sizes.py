"""Bytes that the pools send each other in a step, and the time that their network cards take for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .deployment import Deployment
from .model_facts import AttentionGroup, ModelFacts
from .tables import NetworkLink

_PARTIAL = 4  # bytes of a number of a partial result, which is fp32


class MessageBytes(NamedTuple):
    """Bytes of all layers of a step: to the memory workers, back from them, and from replica to replica."""

    q: float
    kv: float
    o: float
    cut: float

    @property
    def both_ways(self) -> float:
        """Bytes between the pools."""
        return self.q + self.kv + self.o


def message_bytes_of(model: ModelFacts, deployment: Deployment, rows: float) -> MessageBytes:
    """Return the bytes of so many rows. With n > 2 the cut moves on to the next replica, layer by layer."""
    layers = [_of_layers(model, each, deployment, rows) for each in model.attentions]
    cut = model.num_layers * rows * model.hidden_bytes if deployment.batches > 2 else 0.0
    return MessageBytes(sum(x.q for x in layers), sum(x.kv for x in layers), sum(x.o for x in layers), cut)


def network_card_seconds(link: NetworkLink, deployment: Deployment, steps: Iterable[MessageBytes]) -> float:
    """Return the seconds that the busiest network card is busy in one direction with a round of these steps."""
    if deployment.memory is None:
        return 0.0
    out, back, cut = 0.0, 0.0, 0.0
    for each in steps:
        out, back, cut = out + each.q + each.kv, back + each.o, cut + each.cut
    memory = max(out, back) / (deployment.memory_workers * link.bandwidth(deployment.memory))
    compute = (max(out, back) + cut) / (deployment.num_compute * link.bandwidth(deployment.compute))
    return max(memory, compute)


def _of_layers(model: ModelFacts, each: AttentionGroup, deployment: Deployment, rows: float) -> MessageBytes:
    twice = _copies(each.kv_heads // deployment.ranks, deployment.memory_workers // deployment.ranks)
    partial = 1.0 if twice == 1 else _PARTIAL / model.products[0].itemsize
    times = each.count * rows
    return MessageBytes(
        times * twice * each.q_bytes, times * each.kv_message_bytes, times * twice * partial * each.o_bytes, 0.0
    )


def _copies(heads: int, workers: int) -> float:
    """Return how often Q and O of a head are sent on average: once if heads divide evenly. Otherwise a head across a
    border goes to the workers on both sides.
    """
    return 1 + sum(1 for i in range(1, workers) if i * heads % workers) / heads
