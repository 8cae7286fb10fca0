"""The result of ``generate`` if a dict is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from lamina.models.cache_name import cache_name


@dataclass
class SplitOutput(ModelOutput):  # type: ignore[misc]
    """The fields of transformers' GenerateDecoderOnlyOutput without its KV cache, which is on the memory workers.

    ``sequences`` [rows, length]; ``scores`` and ``logits`` have a tensor [rows, vocabulary] fp32 for each step, after
    all processors and before them.
    """

    sequences: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    attentions: None = None
    hidden_states: None = None

    def __getattr__(self, name: str) -> object:
        if name in ("past_key_values", cache_name()):
            raise AttributeError(
                f"{name} is not here: the KV cache lies on the memory workers; pass the whole text again"
            )
        raise AttributeError(f"{type(self).__name__} has no {name!r}")
