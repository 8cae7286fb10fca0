"""One call of ``generate`` as transformers has prepared it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList


@dataclass(frozen=True)
class GenerateCall:
    """A prepared call. A prompt has one row for each of its continuations.

    ``ids`` [rows, length]; ``mask`` [rows, length], 1 where a token counts, on the right of each row. ``limit``: most
    tokens of a text; ``vocabulary``: number of tokens.
    """

    ids: Tensor
    mask: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    limit: int
    vocabulary: int
    own_hooks: bool  # the caller has passed processors or criteria of its own
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a mask with anything but zeros on the left, and for too long a text."""
        kept = self.mask.bool()
        object.__setattr__(self, "prompts", [row[at].tolist() for row, at in zip(self.ids, kept, strict=True)])
        longest = int(kept.sum(1).max())
        if longest + self.max_new_tokens > self.limit:
            raise ValueError(
                f"{longest} tokens of a prompt and max_new_tokens={self.max_new_tokens} exceed the longest text of "
                f"{self.limit} "
                f"tokens: lower max_new_tokens, or wrap the model with a larger max_model_len"
            )

    @property
    def length(self) -> int:
        """Tokens of each prompt with its padding."""
        return int(self.ids.shape[1])

    @property
    def max_new_tokens(self) -> int:
        """New tokens of a row, at most."""
        most = self.criteria.max_length
        return int(self.config.max_length if most is None else most) - self.length

    @property
    def end_token_ids(self) -> list[int] | None:
        """The end tokens; None if rows do not end by tokens."""
        end = next((c.eos_token_id for c in self.criteria if hasattr(c, "eos_token_id")), None)
        return None if end is None else [int(i) for i in end.flatten()]

    @property
    def pad_token_id(self) -> int:
        """The token after a row's end: from the configuration, else the first end token. 0 if rows have no
        end tokens.
        """
        if self.config.pad_token_id is not None:
            return int(self.config.pad_token_id)
        return (self.end_token_ids or [0])[0]

    @property
    def returns_logits(self) -> bool:
        """True if the logits of each step are returned."""
        return bool(self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits))
