"""A sequence: the tokens of one completion, how far they are scheduled, and whether it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lamina.protocol.control import SampledToken
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.request import CompletionOutput, SamplingParams

from .prefix_index import KnownKeys
from .sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from .sessions.session_table import SessionTurn
from .sparsity.kept_kv import KeptKv


class KvTransfer(NamedTuple):
    """The KV of a sequence in transfer, which no rows of compute workers bring. Each part is set by one feature.

    ``loading_tokens``: those whose KV is being loaded. ``on_side_worker``: one computes its first tokens, no compute
    worker does. ``unstored_chunks``: chunks there whose K and V are not stored yet. ``is_scored``: memory workers
    report scores, and then its blocks are dropped. ``is_migrating``: its KV moves to another memory worker.
    """

    loading_tokens: int = 0
    on_side_worker: bool = False
    unstored_chunks: int = 0
    is_scored: bool = False
    is_migrating: bool = False

    @property
    def awaits_report(self) -> bool:
        """True if the report of a memory worker ends a part of it."""
        return self.loading_tokens > 0 or self.is_scored or self.is_migrating

    @property
    def writes_blocks(self) -> bool:
        """True if blocks of the sequence are being written, so that they cannot be freed."""
        return self.loading_tokens > 0 or self.unstored_chunks > 0

    @property
    def lacks_kv(self) -> bool:
        """True if memory workers have not all KV of its computed tokens, or a side worker has more to come."""
        return self.writes_blocks or self.on_side_worker

    def holds_rows(self, num_computed_tokens: int) -> bool:
        """Return whether the sequence has no rows now. Once enough is loaded, it has its first ones."""
        loads = self.loading_tokens > 0 and num_computed_tokens != self.loading_tokens
        return loads or self.on_side_worker or self.is_scored or self.is_migrating


NO_TRANSFER = KvTransfer()


@dataclass(eq=False)
class Sequence:
    """One of a request's n completions. Positions count from 0.

    ``id`` names its KV on the memory workers. A preempted sequence gets a new one when it starts again.
    """

    request_id: int
    params: SamplingParams
    seed: int
    prompt: list[int]
    output: CompletionOutput  # filled by the engine
    max_len: int  # tokens with the prompt, at which it ends
    stop_tokens: frozenset[int]
    salt: bytes = b""  # it shares KV only with sequences of the same salt
    priority: int = 0  # the lowest number runs first
    fair_stamp: int = 0  # within a priority, the lowest number runs first; see FairOrder
    # The one whose batch it shares. A follower belongs to no request, holds up no other one, and is preempted first.
    follows: Sequence | None = None
    options: CacheOptions = DEFAULT_CACHE_OPTIONS  # of its request, for features
    turn: SessionTurn = field(default_factory=SessionTurn)
    id: int = -1  # set by the scheduler on admission, as is the next field
    location: KvLocation = FIRST_LOCATION  # where its KV lies on the memory workers
    num_computed_tokens: int = 0  # positions whose KV is stored or in flight
    num_cached_tokens: int = 0  # those of them whose KV was stored when it was admitted
    kept: KeptKv = field(default_factory=KeptKv)
    step_ends: list[int] = field(default_factory=list)  # lengths at which a step must end
    transfer: KvTransfer = NO_TRANSFER  # set by ``set_transfer``
    num_output_placeholders: int = 0  # tokens being sampled by steps in flight
    # Tokens sampled during a load of its KV. They are dropped if the load fails, since their rows attended it.
    early_tokens: list[SampledToken] = field(default_factory=list)
    num_discarded_samples: int = 0  # tokens to drop from steps in flight, after a failed load
    do_not_cache: bool = False  # no other prompt may reuse its KV, such as after a reset of the prefix cache
    num_preemptions: int = 0  # how often it was preempted
    # Prompt tokens whose log-probabilities are known or requested, less the first.
    num_scored_prompt_tokens: int = 0
    # Tokens of the completion that compute workers have counted for penalties, under this id; -1: none were sent.
    num_tokens_in_penalties: int = -1
    finished: bool = False
    # The caller chooses its tokens by ``set_external_token``; else workers sample them.
    external_sampling: bool = False
    awaits_external_token: bool = False  # its last logits have arrived, and the caller has not chosen yet
    logits_stale: bool = False  # the logits in flight are those after the token before the last
    known_keys: KnownKeys = field(default_factory=KnownKeys)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_prefill_tokens(self) -> int:
        """The number of first tokens that a side worker may compute."""
        kept = self.kept
        return kept.num_prefill_tokens(len(self.tokens)) if kept.drops_blocks else self.num_tokens_with_placeholders

    @property
    def num_tokens_with_placeholders(self) -> int:
        """The number of known tokens and tokens being sampled. Positions below it may be scheduled."""
        return len(self.tokens) + self.num_output_placeholders

    @property
    def is_schedulable(self) -> bool:
        """True if it may have rows.

        It has none while its KV is in transfer, except its first rows once enough is loaded. It has none once its last
        token is known or being sampled, and none while the caller has to choose a token.
        """
        promised = len(self.tokens) + self.num_output_placeholders
        if self.finished or promised >= self.max_len or self.num_computed_tokens >= promised:
            return False
        if self.external_sampling and self.num_output_placeholders > 0:
            return False
        return self.transfer is NO_TRANSFER or not self.transfer.holds_rows(self.num_computed_tokens)

    @property
    def is_decoding(self) -> bool:
        """True if its prompt is computed, or will be by steps in flight."""
        return self.num_computed_tokens > 0 and self.num_tokens_with_placeholders - self.num_computed_tokens <= 1

    def num_schedulable_tokens(self, picked: Mapping[Sequence, int]) -> int:
        """The number of tokens that may have rows now, up to where it drops blocks or a step must end.

        ``picked``: rows of earlier sequences in the same step.
        """
        upto, computed = len(self.tokens) + self.num_output_placeholders, self.num_computed_tokens
        scores = self.kept.scores
        if scores is not None and scores.next_drop_length > computed:
            upto = min(upto, scores.next_drop_length)
        if self.step_ends:
            upto = min(upto, self.next_step_end)
        return upto - computed

    @property
    def next_step_end(self) -> int:
        """The number of tokens after which a step must end; its tokens, if that is nowhere before."""
        return next((n for n in self.step_ends if n > self.num_computed_tokens), self.num_tokens_with_placeholders)

    def add_step_end(self, length: int) -> None:
        """Let a step end after ``length`` tokens."""
        if length not in self.step_ends:
            self.step_ends = sorted([*self.step_ends, length])

    def tokens_at(self, first: int, count: int) -> list[int]:
        """The tokens of scheduled rows; -1 for one that the previous step samples."""
        known = self.tokens[first : first + count]
        return known if len(known) == count else known + [-1] * (count - len(known))

    def set_transfer(self, **parts: Any) -> None:
        """Set parts of its KvTransfer, by their names."""
        self.transfer = self.transfer._replace(**parts)

    def start_after_load(self, valid: int) -> None:
        """End a load of which ``valid`` tokens have arrived. Samples of rows that attended other tokens are dropped."""
        self.num_computed_tokens = self.num_cached_tokens = valid
        self.num_discarded_samples += self.num_output_placeholders - len(self.early_tokens)
        self.num_output_placeholders = 0
        self.early_tokens.clear()
        self.num_tokens_in_penalties = -1

    def hold_back(self, drawn: SampledToken) -> bool:
        """Hold a sampled token until the load of its KV ends, or drop it. Returns False for one that counts now."""
        if self.num_discarded_samples:
            self.num_discarded_samples -= 1
            return True
        if self.transfer is NO_TRANSFER or not self.transfer.loading_tokens:
            return False
        self.early_tokens.append(drawn)
        return True

    def append(self, token: int) -> None:
        """Append a sampled token, and finish the sequence if it ends by it or by length."""
        self.tokens.append(token)
        self.num_output_placeholders -= 1
        if token in self.stop_tokens and self._may_stop:
            self.finish("stop", token if token in (self.params.stop_token_ids or []) else None)
        elif len(self.tokens) >= self.max_len:
            self.finish("length")

    @property
    def _may_stop(self) -> bool:
        """An earlier stop token was drawn only if a grammar allowed no other token."""
        return self.num_output_tokens > self.params.min_tokens or self.params.structured_outputs is not None

    def on_logits_ready(self) -> None:
        """Record that the logits have arrived, with external sampling. The caller chooses the next token."""
        self.num_output_placeholders -= 1
        self.awaits_external_token, self.logits_stale = not self.logits_stale, False

    def set_external_token(self, token: int) -> None:
        """Append the token that the caller has chosen, with external sampling."""
        self.awaits_external_token, self.logits_stale = False, self.num_output_placeholders > 0
        self.num_output_placeholders += 1
        self.append(token)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish the sequence. Idempotent: the first reason stays."""
        if not self.finished:
            self.finished = True
            self.output.finish_reason = reason
            self.output.stop_reason = stop_reason

    def roll_back(self, kept: int) -> None:
        """Discard what is in flight; ``kept`` tokens of its KV are left. On a side worker it begins anew.

        At least one row is recomputed, to sample. Tokens that were sampled during a load are sampled again.
        """
        self.awaits_external_token = False
        kept = min(kept, len(self.tokens) - 1)
        # Other sequences may hold the blocks that it began with.
        whole = not self.transfer.on_side_worker and kept >= self.num_cached_tokens
        self.num_computed_tokens = min(self.num_computed_tokens, kept) if whole else 0
        self.num_output_placeholders = self.num_discarded_samples = 0
        self.early_tokens.clear()
        self.logits_stale, self.transfer = False, NO_TRANSFER

    def reset_computed(self) -> None:
        """Reset its progress. All known tokens will be recomputed under a new id."""
        self.id, self.awaits_external_token = -1, False
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.num_tokens_in_penalties, self.transfer = -1, NO_TRANSFER
