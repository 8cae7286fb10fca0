"""How prefill workers have beginnings of prompts from each other: whom each meets, and what it asks."""

from __future__ import annotations

import msgspec

from .control import Address


class MeetPrefill(msgspec.Struct, frozen=True, kw_only=True, tag="meet-prefill"):
    """Driver -> prefill worker, once all of them have answered their Connect: each opens a channel to each other one of
    ``peers``, of which it is number ``me``, under the same view. No answer: what is to be fetched comes behind it.
    """

    peers: list[Address]
    me: int


class BeginningAsk(msgspec.Struct, frozen=True, array_like=True):
    """Send K and V of whole blocks of ``sequence``, of ``count`` tokens from position ``first`` on, for a step."""

    sequence: int
    first: int
    count: int
    batch: int
    step: int
