"""The parts of the calls of ``features``, and the comparison of their results. Tokens are compared exactly, and logits
within the noise of fp32. Draws are compared by their distribution where a worker samples, and by their seed where they
are drawn here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
)

NEW = 5
PROMPT = "def __init__(self):\n"


DRAWS = 1000  # of which a share of 0.16 that is another is seen, and chance does not look like one


class Shares:
    """The distribution of first tokens, expected or drawn: a share of each token."""

    def __init__(self, shares: Tensor) -> None:
        self.shares = shares

    @classmethod
    def of(cls, drawn: Tensor) -> Shares:
        """Counts tokens that were drawn many times from the same logits."""
        return cls(torch.bincount(drawn, minlength=2048) / len(drawn))

    def far_from(self, other: Shares) -> bool:
        """Returns whether some share of them differs by more than chance does."""
        return bool((self.shares - other.shares).abs().sum() / 2 > 0.08)


@dataclass
class Desk:
    """The arguments of calls."""

    tokenizer: Any
    ids: Tensor  # [1, length]
    batch: dict[str, Tensor]  # three prompts, padded on the left

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        tokenizer.padding_side = "left"
        texts = [PROMPT, "import os\nimport sys\n\n", "class"]
        padded = tokenizer(texts, return_tensors="pt", padding=True)
        self.batch = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}

    @property
    def mask(self) -> Tensor:
        return torch.ones_like(self.ids)

    def one(self, m: Any, **settings: Any) -> Any:
        """Calls for one prompt."""
        return m.generate(self.ids, **{"attention_mask": self.mask, "max_new_tokens": NEW} | settings)

    def all(self, m: Any, **settings: Any) -> Any:
        """Calls for the batch."""
        return m.generate(**self.batch, **{"max_new_tokens": NEW} | settings)

    def likely(self, m: Any, **settings: Any) -> list[int]:
        """The tokens that ``one`` gives without ``settings``."""
        out: list[int] = self.one(m.model if hasattr(m, "llm") else m)[0, self.ids.shape[1] :].tolist()
        return out


class Plus(LogitsProcessor):  # type: ignore[misc]
    """Prefers a token, the more the longer the text is; and records what it has seen."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shapes.append((*input_ids.shape, *scores.shape, int(input_ids.sum())))
        scores = scores.clone()
        scores[:, 40 + input_ids.shape[1]] += 3.0
        return scores


class After(StoppingCriteria):  # type: ignore[misc]
    """Ends row r after r + 2 new tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        rows = torch.arange(input_ids.shape[0])
        return input_ids.shape[1] - self.length >= rows + 2


class Sink:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


Call = Callable[[Any, Desk], Any]


@dataclass
class Tried:
    """The result of a call."""

    value: Any = None
    error: BaseException | None = None


def tried(call: Call, m: Any, desk: Desk) -> Tried:
    """``call`` on ``m``, from a fixed seed."""
    torch.manual_seed(7)
    try:
        return Tried(call(m, desk))
    except Exception as e:  # noqa: BLE001 - whatever refuses
        return Tried(error=e)


def same(a: Any, b: Any) -> bool:
    """Returns whether two values agree: logits within the noise of fp32, all else exactly, draws by their shares."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b, rtol=1e-3, atol=1e-3)
    if isinstance(a, Shares) and isinstance(b, Shares):
        return not a.far_from(b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


SAME = "same"
BOTH = "refused by both"
ALONE = "refused by Lamina alone"
ACCEPTED = "accepted where transformers refuses"
DIFFERENT = "silently different"


def classify(own: Tried, wrapped: Tried) -> str:
    """Classifies what the model gave, and its wrap."""
    if own.error is not None:
        return BOTH if wrapped.error is not None else ACCEPTED
    if wrapped.error is not None:
        return ALONE
    return SAME if same(own.value, wrapped.value) else DIFFERENT
