"""The seam of rules about which tokens may be drawn: a rule for each sequence, and the mask that it gives each draw.

``allowed_token_ids`` is a rule here. A grammar is another one, which the worker hands in (``lamina.grammar``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor


class TokenMask(Protocol):
    """The tokens that may be drawn for one row. All others get minus infinity."""

    @property
    def few_token_ids(self) -> Sequence[int] | None:
        """The allowed tokens, ascending, if these are so few that ranks should exchange their logits alone."""
        ...

    @property
    def bits(self) -> Tensor | None:
        """The mask as ``allowed`` of SampleSpec; None if it has another form."""
        ...

    @property
    def overrules_min_tokens(self) -> bool:
        """True if stop tokens before ``min_tokens`` may be drawn where the mask allows no other token."""
        ...

    def apply(self, logits: Tensor, first: int = 0) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place. ``logits`` [n]: of tokens from ``first`` on.
        Raises ValueError if the mask names tokens beyond the vocabulary.
        """
        ...


class TokenRule(Protocol):
    """A rule about the continuation of one sequence. Calls come from one thread, ``begin`` before ``mask``."""

    def begin(self, num_known: int, tokens: Sequence[int]) -> None:
        """Begin to make the mask after ``tokens``, which follow the first ``num_known`` tokens of the completion. It
        may take another thread. ``num_known`` is at most ``num_tokens``.
        """
        ...

    @property
    def num_tokens(self) -> int:
        """The tokens of the completion that the rule has followed."""
        ...

    def mask(self) -> TokenMask:
        """Return the mask that ``begin`` has begun."""
        ...


class AllowedTokens:
    """A fixed set of tokens: it is the rule, and the mask of every draw."""

    bits = None
    overrules_min_tokens = False
    num_tokens = 0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = torch.tensor(sorted({*token_ids}), dtype=torch.int64)
        self.few_token_ids: list[int] = cast("list[int]", self._ids.tolist())

    def begin(self, num_known: int, tokens: Sequence[int]) -> None:
        """Do nothing: the tokens so far do not matter."""

    def mask(self) -> TokenMask:
        """Return itself."""
        return self

    def apply(self, logits: Tensor, first: int = 0) -> None:
        """Set the logits of all other tokens to minus infinity, in place."""
        own = self._ids[(self._ids >= first) & (self._ids < first + len(logits))].to(logits.device) - first
        logits.copy_(torch.full_like(logits, float("-inf")).index_copy_(0, own, logits[own]))


def forbid(logits: Tensor, bits: Tensor, first: int = 0) -> None:
    """Set the logits of tokens that ``bits`` does not allow to minus infinity, in place. ``bits``: as ``allowed`` of
    SampleSpec. ``logits`` [n]: of tokens from ``first`` on.
    """
    whole = first // 8
    forbidden = np.unpackbits(~bits[whole : (first + len(logits) + 7) // 8].numpy(), bitorder="little").view(bool)
    part = torch.from_numpy(forbidden[first - 8 * whole :][: len(logits)]).to(logits.device)
    logits[: len(part)].masked_fill_(part, float("-inf"))
    logits[len(part) :] = float("-inf")
