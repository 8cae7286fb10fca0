"""The tokens that penalties and bad words count, as a compute worker knows them, by sequence.

Every sampling request of a sequence brings them to every worker that draws, even if another replica draws. The first
request has all tokens, each later one the tokens since. The driver has the complete history. It sends all again to
workers that may know nothing: under a new id, as after a preemption, and to prefill workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.protocol.control import Penalties, SamplingRequest
from lamina.protocol.step_plan import Free, SequenceOp, Truncate

from .token_mask import AllowedTokens, TokenMask, TokenRule

MAX_TOKEN_ID = (1 << 31) - 1  # the largest possible id
NO_TOKENS = torch.empty(0, dtype=torch.int64)


class LogitChanges(NamedTuple):
    """The penalties and biases on the logits of one row, and the tokens that they count."""

    penalties: Penalties
    counts: dict[int, int]  # token -> how often the completion has it
    tokens: Tensor  # int64, distinct, of prompt and completion; none if no penalty counts both
    max_token_id: int  # the largest token id, also of those with a bias
    banned_token_ids: Sequence[int] = ()  # tokens that would complete a bad word
    masks: Sequence[TokenMask] = ()  # only tokens that every one of them allows may be drawn


class BadWords:
    """The runs of tokens that a completion must not have."""

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
        """The words by their last token but one. Only computed by a worker that draws, as all others have the words,
        too.
        """
        by_last_token = defaultdict[int, list[list[int]]](list)
        for word in self._words:
            if len(word) > 1:
                by_last_token[word[-2]].append(word)
        return by_last_token

    def completed(self, end: list[int]) -> list[int]:
        """Return the tokens that would complete a word after a completion's last tokens ``end``; ``longest`` of them
        suffice.
        """
        by_last_token = self._behind.get(end[-1], ()) if end else ()
        return [*self._always, *(word[-1] for word in by_last_token if end[1 - len(word) :] == word[:-1])]


class TokenHistory:
    """The tokens of one sequence that penalties and bans count."""

    def __init__(self, penalties: Penalties, rules: Iterable[TokenRule] = ()) -> None:
        """``rules``: in addition to those of ``penalties``. Raises ValueError for invalid token ids."""
        self.token_ids: list[int] = []  # the completion's tokens
        self._penalties = penalties
        self._counts: Counter[int] = Counter()
        self._counted = 0  # how many of ``token_ids`` are counted
        self._prompt = frozenset(penalties.prompt_token_ids)
        self._repeats = penalties.repetition != 1.0
        self._words = BadWords(penalties.bad_words_token_ids)
        self._rules = [*rules]
        if penalties.allowed_token_ids:
            self._rules.append(AllowedTokens(penalties.allowed_token_ids))
        self._begun: tuple[int, int | None] | None = None  # the draw whose masks the rules are making
        named = (
            *penalties.prompt_token_ids,
            *penalties.logit_bias,
            *penalties.allowed_token_ids,
            *chain.from_iterable(penalties.bad_words_token_ids),
        )
        self._most = _largest(named)

    def append(self, tokens: list[int]) -> None:
        """Append tokens of the completion. Raises ValueError for invalid ids."""
        self._most = max(self._most, _largest(tokens))
        self.token_ids += tokens

    def begin(self, count: int, pending: int | None) -> None:
        """Begin to make the masks that ``logit_changes`` returns for the same arguments. Idempotent."""
        if self._begun == (count, pending):
            return
        self._begun = count, pending
        for rule in self._rules:
            known = min(rule.num_tokens, count)
            rule.begin(known, self.token_ids[known:count] + ([] if pending is None else [pending]))

    def logit_changes(self, count: int, pending: int | None) -> LogitChanges:
        """Return the changes of logits after the first ``count`` tokens of the completion. ``pending``: the token drawn
        after these, if there is one.
        """
        self.begin(count, pending)
        if count < self._counted:
            self._counts, self._counted = Counter(), 0
        self._counts.update(self.token_ids[self._counted : count])
        self._counted = count
        counts = self._counts
        if pending is not None:
            counts = counts.copy()
            counts[pending] += 1
        tokens = NO_TOKENS
        if self._repeats:
            more = (t for t in counts if t not in self._prompt)
            tokens = torch.tensor([*self._penalties.prompt_token_ids, *more], dtype=torch.int64)
        most = max(self._most, -1 if pending is None else pending)
        end = self.token_ids[max(0, count - self._words.longest) : count] + ([] if pending is None else [pending])
        forbidden = self._words.completed(end)
        masks = [rule.mask() for rule in self._rules]
        return LogitChanges(self._penalties, counts, tokens, most, forbidden, masks)


class PendingHistory(NamedTuple):
    """The history for a coming draw, and how much of it counts."""

    history: TokenHistory
    num_tokens: int  # tokens of the completion


def no_rules(penalties: Penalties) -> Iterable[TokenRule]:
    """Return no rule, for workers whose requests have no grammar."""
    return ()


class TokenHistories(dict[int, TokenHistory]):
    """The histories of all sequences that have one. While there is one, it must see every step, in order, even if
    another worker draws.
    """

    def __init__(self, rules_of: Callable[[Penalties], Iterable[TokenRule]] = no_rules) -> None:
        """``rules_of``: makes the rules of a new sequence that are not in this package."""
        super().__init__()
        self._rules_of = rules_of

    def note(self, ops: Iterable[SequenceOp], draws: Iterable[SamplingRequest]) -> dict[int, PendingHistory]:
        """Note the tokens that requests bring, and forget freed sequences. Returns the histories to count, by sequence.
        Raises ValueError for a request that builds on tokens that this worker does not have.
        """
        for op in ops:
            if isinstance(op, Free | Truncate):  # a truncated sequence draws no more
                self.pop(op.sequence, None)
        return {d.sequence: self._due(d) for d in draws if d.logits_update is not None}

    def _due(self, draw: SamplingRequest) -> PendingHistory:
        adjust = draw.logits_update
        assert adjust is not None
        if adjust.penalties is not None:
            self[draw.sequence] = TokenHistory(adjust.penalties, self._rules_of(adjust.penalties))
        history = self.get(draw.sequence)
        known = -1 if history is None else len(history.token_ids)
        if history is None or known != adjust.num_known_tokens:
            here = "nothing" if history is None else f"{known} tokens"
            raise ValueError(
                f"penalties of sequence {draw.sequence}: a draw builds on {adjust.num_known_tokens} counted tokens, "
                f"this worker "
                f"has {here}"
            )
        history.append(adjust.tokens)
        return PendingHistory(history, len(history.token_ids))


def logit_changes_of(due: Mapping[int, PendingHistory], pending: Mapping[int, int]) -> dict[int, LogitChanges]:
    """Return the changes of logits by sequence. ``pending``: tokens of the last step, of sequences that count them
    too.
    """
    return {sequence: d.history.logit_changes(d.num_tokens, pending.get(sequence)) for sequence, d in due.items()}


def _largest(ids: Iterable[int]) -> int:
    ids = list(ids)
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
        raise ValueError(f"penalties name the token {min(ids) if min(ids) < 0 else max(ids)}, which is not valid")
    return max(ids, default=-1)
