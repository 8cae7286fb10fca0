"""Counts the tokens of a completion's reasoning, its marks included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina.models.tokenizer import Detokenizer
from lamina.server.reasoning_parsers import REASONING_PARSERS


class ReasoningCount:
    """Counts in one completion, token by token."""

    def __init__(self, name: str, tokenizer: Any, prompt: Sequence[int], prompt_end: str) -> None:
        """``name``: of the reasoning parser. ``prompt``: its token ids, whose text ends with ``prompt_end``."""
        self._parser = REASONING_PARSERS[name].open(prompt_end)
        self._texts = Detokenizer(tokenizer, prompt, skip_special_tokens=False)
        self._has_reasoning = False
        self._num_read = 0

    @property
    def tokens(self) -> int:
        """The tokens so far."""
        return self._num_read if self._has_reasoning else 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Read tokens, up to the end of reasoning."""
        for token in token_ids:
            if self._parser.has_ended:
                return
            self._num_read += 1
            self._has_reasoning |= bool(self._parser.push(self._texts.push([token])).reasoning)
