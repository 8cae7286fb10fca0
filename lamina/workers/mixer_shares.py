"""The shares of memory workers in a recurrent layer. It imports no torch, so the engine's process reads it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from lamina.config.partition import Partition, state_shares
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.mixers import MixerShape


def with_shares(mixer: MixerShape, name: str, partition: Partition, weights: Sequence[float]) -> MixerShape:
    """Return a recurrent layer with the shares of memory workers. Arguments and errors as of ``state_shares``."""
    spec = RecurrenceSpec.decode(mixer.spec)
    return structs.replace(mixer, shares=state_shares(name, partition, spec.heads, weights, spec.run))
