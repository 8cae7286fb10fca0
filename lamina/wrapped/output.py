"""What ``generate`` returns where a dict is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class SplitOutput(ModelOutput):  # type: ignore[misc]
    """As transformers' GenerateDecoderOnlyOutput, without ``past_key_values``: the cache is on the memory workers.

    ``sequences`` [rows, length]; ``scores`` and ``logits``: of each step [rows, vocabulary] fp32, behind all processors
    and before them.
    """

    sequences: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    attentions: None = None
    hidden_states: None = None

    def __getattr__(self, name: str) -> object:
        if name == "past_key_values":
            raise AttributeError(
                "past_key_values is not here: the KV cache lies on the memory workers; pass the whole text again"
            )
        raise AttributeError(f"{type(self).__name__} has no {name!r}")
