"""What a compute worker knows of the tokens that penalties and bad words count, sequence by sequence.

Every worker that draws is told of them by every draw of a sequence, also of those that another replica makes: the first
one tells all, each later one the tokens since. The driver keeps the truth. It tells all again where it may have told
nothing: under a new id, as behind a preemption, and to prefill workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.protocol.control import Draw, Penalties
from lamina.protocol.plan import Free, SequenceOp, Truncate

MOST_ID = (1 << 31) - 1  # of a token
NO_TOKENS = torch.empty(0, dtype=torch.int64)


class Seen(NamedTuple):
    """Penalties and biases on the logits of one row, and the tokens that they count."""

    penalties: Penalties
    counts: dict[int, int]  # token -> how often the completion has it
    tokens: Tensor  # int64, distinct, of prompt and completion; none where no penalty looks at both
    most: int  # the largest id of a token, also of those with a bias
    forbidden: Sequence[int] = ()  # they would complete a bad word
    allowed: Tensor | None = None  # int64; no others may be chosen. None: all


class BadWords:
    """Runs of tokens that a completion must not have."""

    def __init__(self, words: Sequence[list[int]]) -> None:
        """Raises ValueError for an empty one."""
        if not all(words):
            raise ValueError("penalties have a bad word without tokens")
        self._words = words
        self.longest = max(map(len, words), default=0)

    @cached_property
    def _always(self) -> list[int]:
        return [word[0] for word in self._words if len(word) == 1]

    @cached_property
    def _behind(self) -> dict[int, list[list[int]]]:
        """Words by their last token but one. Made by who draws: all others are told of them, too."""
        behind = defaultdict[int, list[list[int]]](list)
        for word in self._words:
            if len(word) > 1:
                behind[word[-2]].append(word)
        return behind

    def completed(self, end: list[int]) -> list[int]:
        """The tokens that would complete one behind a completion's last tokens ``end``, of which ``longest`` do."""
        behind = self._behind.get(end[-1], ()) if end else ()
        return [*self._always, *(word[-1] for word in behind if end[1 - len(word) :] == word[:-1])]


class History:
    """The tokens of one sequence that penalties and bans look at."""

    def __init__(self, penalties: Penalties) -> None:
        """Raises ValueError for ids that are none."""
        self.told: list[int] = []  # the completion
        self._penalties = penalties
        self._counts: Counter[int] = Counter()
        self._counted = 0  # of ``told``
        self._prompt = frozenset(penalties.prompt)
        self._repeats = penalties.repetition != 1.0
        self._words = BadWords(penalties.bad_words)
        self._allowed = torch.tensor(sorted({*penalties.allowed}), dtype=torch.int64) if penalties.allowed else None
        named = (*penalties.prompt, *penalties.bias, *penalties.allowed, *chain.from_iterable(penalties.bad_words))
        self._most = _largest(named)

    def tell(self, tokens: list[int]) -> None:
        """More of the completion. Raises ValueError for ids that are none."""
        self._most = max(self._most, _largest(tokens))
        self.told += tokens

    def seen(self, count: int, pending: int | None) -> Seen:
        """The changes of logits behind the first ``count`` tokens of the completion and ``pending``, the token drawn
        behind them, if there is one.
        """
        if count < self._counted:
            self._counts, self._counted = Counter(), 0
        self._counts.update(self.told[self._counted : count])
        self._counted = count
        counts = self._counts
        if pending is not None:
            counts = counts.copy()
            counts[pending] += 1
        tokens = NO_TOKENS
        if self._repeats:
            more = (t for t in counts if t not in self._prompt)
            tokens = torch.tensor([*self._penalties.prompt, *more], dtype=torch.int64)
        most = max(self._most, -1 if pending is None else pending)
        end = self.told[max(0, count - self._words.longest) : count] + ([] if pending is None else [pending])
        forbidden = self._words.completed(end)
        return Seen(self._penalties, counts, tokens, most, forbidden, self._allowed)


class Due(NamedTuple):
    """The history of a draw to come, and how much of it counts."""

    history: History
    told: int  # tokens of the completion


class Histories:
    """The histories of all sequences that have one. Every step has to be told, in order, whoever draws."""

    def __init__(self) -> None:
        self._of: dict[int, History] = {}

    def __len__(self) -> int:
        return len(self._of)

    def learn(self, ops: Iterable[SequenceOp], draws: Iterable[Draw]) -> dict[int, Due]:
        """Note the tokens that ``draws`` tell. Returns, by sequence, the counts for each draw with an Adjust. Freed
        sequences are forgotten.

        Raises ValueError for a draw that builds on tokens that were not told here.
        """
        for op in ops:
            if isinstance(op, Free | Truncate):  # truncated: it draws no more
                self._of.pop(op.sequence, None)
        return {d.sequence: self._due(d) for d in draws if d.adjust is not None}

    def _due(self, draw: Draw) -> Due:
        adjust = draw.adjust
        assert adjust is not None
        if adjust.start is not None:
            self._of[draw.sequence] = History(adjust.start)
        history = self._of.get(draw.sequence)
        known = -1 if history is None else len(history.told)
        if history is None or known != adjust.since:
            here = "nothing" if history is None else f"{known} tokens"
            raise ValueError(
                f"penalties of sequence {draw.sequence}: a draw builds on {adjust.since} counted tokens, this worker "
                f"was told {here}"
            )
        history.tell(adjust.tokens)
        return Due(history, len(history.told))


def seen_of(due: Mapping[int, Due], pending: Mapping[int, int]) -> dict[int, Seen]:
    """By sequence; ``pending``: tokens that the step before drew, of the sequences whose draws count them too."""
    return {sequence: d.history.seen(d.told, pending.get(sequence)) for sequence, d in due.items()}


def _largest(ids: Iterable[int]) -> int:
    ids = list(ids)
    if ids and not 0 <= min(ids) <= max(ids) <= MOST_ID:
        raise ValueError(f"penalties name the token {min(ids) if min(ids) < 0 else max(ids)}, which is none")
    return max(ids, default=-1)
