"""The meaning of an attention operator as data. It imports no torch, so planners and tools can read it."""

from __future__ import annotations

import msgspec


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole meaning of one core-attention operator, except for its tensors.

    For a query at position t and a key at position s <= t, with head-wise tensors q, k, v:

        score = (q . k) * scale
        score = softcap * tanh(score / softcap)          if softcap > 0
        score = score + slope[head] * (s - t)            if alibi
        visible only where s > t - window                if window > 0
        o = sum_s softmax(score)[s] * v[s]               with exp(sink[head]) added to the denominator if sinks
    """

    scale: float
    window: int = 0  # tokens seen by a query, itself included; 0 = all
    softcap: float = 0.0  # 0 = none
    sinks: bool = False  # one learnt logit per query head, an operand
    alibi: bool = False  # one slope per query head, an operand

    def __post_init__(self) -> None:
        if not 0.0 < self.scale < float("inf"):
            raise ValueError(f"attention scale must be positive and finite, not {self.scale}")
        if self.window < 0 or self.softcap < 0.0:
            raise ValueError(f"attention window and softcap must not be negative: {self.window}, {self.softcap}")

    def encode(self) -> str:
        """Return the spec as canonical text: equal specs have equal text. It is an argument of the captured
        operator.
        """
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> AttentionSpec:
        """Return the spec of a text by ``encode``. Raises msgspec.ValidationError for anything else."""
        return msgspec.json.decode(text, type=AttentionSpec)
