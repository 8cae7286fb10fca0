"""One completion on its way: its tokens, how far it has been scheduled, and when it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from lamina.kv.sparsity import BlockScores
from lamina.protocol.control import SampledToken
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.request import CompletionOutput, SamplingParams

from .sessions.session_table import SessionState
from .sessions.token_ranges import TokenRanges
from .sparsity.error_budget import CompletionErrors

if TYPE_CHECKING:
    from .prefix_index import PageKeys

FULL_ATTENTION_SALT = b" dense"  # after the salt of sequences that attend all of their KV where others attend some


@dataclass(eq=False)
class Sequence:
    """A request's n completions are n sequences. Positions count from 0; all fields are the driver's.

    ``id`` names the KV on the memory workers: a preempted sequence comes back under a new one.
    """

    is_hidden: ClassVar[bool] = False  # it belongs to no request, holds up no other one, and gives way before all

    request_id: int
    params: SamplingParams
    seed: int
    prompt: list[int]
    output: CompletionOutput  # filled by the engine as tokens arrive
    max_len: int  # tokens, prompt included, at which it ends
    stop_tokens: frozenset[int]
    salt: bytes = b""  # it shares KV with sequences of the same salt only
    affinity_key: bytes = b""  # where there is room it begins where others of its kin did
    priority: int = 0  # who waits with a lower number comes first
    fair_stamp: int = 0  # of those with one priority, who waits with a lower number comes first; see FairOrder
    retention_s: float = 0.0  # after its end, for which its pages are not given up as long as others can be
    discarded_ranges: TokenRanges = ()  # tokens that a longer prompt has lost: it shares KV with its session alone
    original_prompt: list[int] = field(default_factory=list)  # that longer prompt, where it has lost some
    session: SessionState | None = None  # of which it is a turn
    id: int = -1  # set by the scheduler on admission, as the next one
    location: KvLocation = FIRST_LOCATION  # of its KV on the memory workers
    num_computed_tokens: int = 0  # positions whose KV is stored or on its way
    num_cached_tokens: int = 0  # how many of these had their KV stored at its admission
    evicts_kv: bool = False  # in most layers it keeps only some of its KV: no other sequence may begin with that
    full_attention: bool = False  # its rows attend all of its KV, where sparse sequences attend a part
    kv_budget: int = 0  # tokens that it keeps or attends; 0: as many as the engine's options say
    block_scores: BlockScores | None = None  # of a sparse one that has had rows
    awaits_block_scores: bool = False  # so it has no rows before memory workers report and its blocks are dropped
    num_loading_tokens: int = 0  # tokens whose KV is being loaded; until then it has no rows, or only the first ones
    num_output_placeholders: int = 0  # tokens being drawn by steps in flight
    # Tokens drawn while its KV is still being loaded. If the load fails, their rows have attended KV that never came.
    early_tokens: list[SampledToken] = field(default_factory=list)
    num_discarded_samples: int = 0  # tokens that steps in flight draw after a failed load: they count for nothing
    prefill_worker: int | None = None  # the one that computes its prompt; until then the sequence has no rows
    do_not_cache: bool = False  # it has outlived a reset of the prefix cache: its KV serves no other prompt
    num_pending_prefill_chunks: int = 0  # chunks there whose K and V are not stored yet
    num_preemptions: int = 0  # how often its KV was freed for others
    # Tokens of the prompt whose log-probabilities are known or on their way, less the first.
    num_scored_prompt_tokens: int = 0
    # Tokens of the completion that all compute workers count, under this id; -1: they know nothing.
    num_tokens_in_penalties: int = -1
    finished: bool = False
    is_migrating: bool = False  # to another memory worker: it has no rows before it is there
    # Its tokens are chosen elsewhere, by ``set_external_token``; else workers draw them.
    external_sampling: bool = False
    awaits_external_token: bool = False  # the logits after its last token are known, and its next token is not
    logits_stale: bool = False  # the logits on their way are those after the token before the last
    # Tokens of the pages that were to be saved as they filled, if pages are offloaded.
    num_tokens_offloaded: int = 0
    # Keys of its pages, as far as they were asked for: of whole ones, and by length of those that are not whole.
    page_keys: dict[PageKeys, list[bytes]] = field(default_factory=dict)
    partial_page_keys: dict[tuple[PageKeys, int], bytes] = field(default_factory=dict)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def session_to_retain(self) -> SessionState | None:
        """The session that continues after it, if it is a turn that has ended by itself."""
        ended = self.output.finish_reason in ("stop", "length")
        return self.session if ended and not self.do_not_cache else None

    @property
    def num_tokens_with_placeholders(self) -> int:
        """Tokens known or being drawn: positions below may be scheduled."""
        return len(self.tokens) + self.num_output_placeholders

    @property
    def is_schedulable(self) -> bool:
        """True if it may have rows. It has none while a prefill worker computes it, its blocks are scored, or its KV is
        being loaded, but for its first rows once enough is there. Nor has it once its last token is known or being
        drawn, nor until a token that is chosen by the caller is known.
        """
        promised = len(self.tokens) + self.num_output_placeholders
        ended = (
            self.finished or promised >= self.max_len or (self.external_sampling and self.num_output_placeholders > 0)
        )
        loads = self.num_loading_tokens > 0 and self.num_computed_tokens != self.num_loading_tokens
        waits = self.prefill_worker is not None or loads or self.awaits_block_scores or self.is_migrating
        return not ended and not waits and self.num_computed_tokens < promised

    @property
    def is_decoding(self) -> bool:
        """True if its rows come one by one: its prompt is stored, or will be by steps in flight."""
        return self.num_computed_tokens > 0 and self.num_tokens_with_placeholders - self.num_computed_tokens <= 1

    def num_schedulable_tokens(self, picked: Mapping[Sequence, int]) -> int:
        """Tokens that it could have rows for now, up to where it loses blocks; ``picked``: rows of those before it in
        the same step.
        """
        upto = self.num_tokens_with_placeholders
        if self.block_scores is not None and self.block_scores.next_drop_length > self.num_computed_tokens:
            upto = min(upto, self.block_scores.next_drop_length)
        return upto - self.num_computed_tokens

    def tokens_at(self, first: int, count: int) -> list[int]:
        """The tokens of scheduled rows; -1 where the step before draws it."""
        known = self.tokens[first : first + count]
        return known if len(known) == count else known + [-1] * (count - len(known))

    def start_after_load(self, valid: int) -> None:
        """So many tokens of what was to be loaded are there, and no more. What rows have seen of it counts not."""
        self.num_computed_tokens = self.num_cached_tokens = valid
        self.num_discarded_samples += self.num_output_placeholders - len(self.early_tokens)
        self.num_output_placeholders = 0
        self.early_tokens.clear()
        self.num_tokens_in_penalties = -1

    def hold_back(self, drawn: SampledToken) -> bool:
        """Keep a token until the load of its KV has ended, or drop it. Return False for one that counts now."""
        if self.num_discarded_samples:
            self.num_discarded_samples -= 1
            return True
        if self.num_loading_tokens:
            self.early_tokens.append(drawn)
            return True
        return False

    def append(self, token: int) -> None:
        """Take a drawn token and decide whether it ends the sequence by token or by length."""
        self.tokens.append(token)
        self.num_output_placeholders -= 1
        if token in self.stop_tokens and self.num_output_tokens > self.params.min_tokens:
            self.finish("stop", token if token in (self.params.stop_token_ids or []) else None)
        elif len(self.tokens) >= self.max_len:
            self.finish("length")

    def on_logits_ready(self) -> None:
        """A held one's logits have come: the next token is to be chosen."""
        self.num_output_placeholders -= 1
        self.awaits_external_token, self.logits_stale = not self.logits_stale, False

    def set_external_token(self, token: int) -> None:
        """The next token of a held one that waits."""
        self.awaits_external_token, self.logits_stale = False, self.num_output_placeholders > 0
        self.num_output_placeholders += 1
        self.append(token)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Idempotent: the first reason stays."""
        if not self.finished:
            self.finished = True
            self.output.finish_reason = reason
            self.output.stop_reason = stop_reason

    def roll_back(self, kept: int) -> None:
        """Forget all that is in flight; ``kept`` tokens of its KV are there. On prefill workers it begins anew. A
        row is left to draw: tokens that were drawn while KV was loaded, and are not in its output, are drawn again.
        """
        self.awaits_external_token = False
        kept = min(kept, len(self.tokens) - 1)
        # Others may hold the blocks that it began with.
        whole = self.prefill_worker is None and kept >= self.num_cached_tokens
        whole = whole and not self.evicts_kv  # what it has lost is needed to compute the rest again
        self.num_computed_tokens = min(self.num_computed_tokens, kept) if whole else 0
        self.num_output_placeholders = self.num_pending_prefill_chunks = self.num_loading_tokens = (
            self.num_discarded_samples
        ) = 0
        self.early_tokens.clear()
        self.logits_stale = self.is_migrating = False
        self.prefill_worker = None

    @property
    def follows(self) -> Sequence | None:
        """The sequence in whose batch it has to be; None: any batch will do."""
        return None

    def interrupt(self) -> None:
        """Take note that steps do not go on as they did: batches are dealt anew, or workers were lost."""

    def forget_page_keys(self) -> None:
        """Take note that its pages have other keys from now on."""
        self.page_keys.clear()
        self.partial_page_keys.clear()

    def reset_computed(self) -> None:
        """Forget what was scheduled; everything that is known will be computed again under a new id."""
        self.id, self.awaits_external_token = -1, False
        self.num_computed_tokens = self.num_cached_tokens = self.num_loading_tokens = self.num_tokens_offloaded = 0
        self.num_tokens_in_penalties = -1
        self.awaits_block_scores = self.is_migrating = False
        if self.block_scores is not None:
            self.block_scores.reset()


class ReferenceSequence(Sequence):
    """A sequence with all KV, which is given the tokens of another one that has not: so one sees how far they are
    apart. It is computed as others are until it has come as far as that one; then it has its rows in the same steps.
    It belongs to no request, and no client sees it.
    """

    is_hidden = True

    def __init__(self, of: Sequence) -> None:
        output = CompletionOutput(-1)
        params = replace(of.params, prompt_logprobs=None, logprobs=None)  # they are not read
        super().__init__(-1, params, 0, of.prompt, output, of.max_len, of.stop_tokens, of.salt)
        self.target, self.tokens, self.do_not_cache, self.priority = of, of.tokens, True, of.priority
        self._attempt = of.num_preemptions
        self.errors = CompletionErrors(of.max_len - len(of.prompt))  # compares with the other one's tokens

    @property
    def follows(self) -> Sequence:
        """The one whose tokens it is given."""
        return self.target

    def interrupt(self) -> None:
        """End: it has no longer its rows in the steps of the other one."""
        self.finish("abort")

    @property
    def is_orphaned(self) -> bool:
        """True if the other one has ended, or begins anew."""
        return self.target.finished or self.target.num_preemptions != self._attempt

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End; before the end of the other one it has not seen all of that."""
        if not self.finished:
            self.errors.end(whole=self.target.finished)
        super().finish(reason, stop_reason)

    @property
    def num_tokens_with_placeholders(self) -> int:
        return self.target.num_tokens_with_placeholders

    @property
    def is_schedulable(self) -> bool:
        return not self.finished and self.num_computed_tokens < max(
            len(self.prompt) - 1, self.target.num_computed_tokens + 1
        )

    def num_schedulable_tokens(self, picked: Mapping[Sequence, int]) -> int:
        """Return the rows up to where the other one is after this step. Its last token may still be on its way."""
        of = self.target
        upto = of.num_computed_tokens + picked[of] if of in picked else min(of.num_computed_tokens, len(self.tokens))
        return max(upto, len(self.prompt) - 1, self.num_computed_tokens) - self.num_computed_tokens
