"""The part of its KV that a sequence keeps or attends. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.kv.sparsity import BlockScores

FULL_ATTENTION_SALT = b" dense"  # added to the salt of sequences that attend all KV on a sparse engine


@dataclass(eq=False)
class KeptKv:
    """The facts of a sequence that features of sparsity need. By default it keeps and attends all.

    ``drops_blocks``: it drops KV in most layers, so no other sequence may reuse it. ``num_scored_rows``: the last rows
    before that, which compute workers run. ``prefill_unit``: prompts are cut at its multiples. ``full_attention``: it
    attends all of its KV, on a sparse engine. ``budget``: tokens that it keeps or attends; 0: the engine's default.
    ``scores``: there once a sequence that drops blocks has had rows.
    """

    drops_blocks: bool = False
    num_scored_rows: int = 0
    prefill_unit: int = 1
    full_attention: bool = False
    budget: int = 0
    scores: BlockScores | None = None

    def num_prefill_tokens(self, known: int) -> int:
        """Return how many of the first ``known`` tokens a prefill worker may compute: memory workers score the rows
        before it drops blocks, and rows after that lack these blocks.
        """
        stop = known if self.scores is None else min(known, self.scores.next_drop_length)
        return max(0, stop - self.num_scored_rows) // self.prefill_unit * self.prefill_unit

    @property
    def lacks_blocks(self) -> bool:
        """True if blocks of its first tokens are dropped, or will be with the next plan."""
        return self.scores is not None and len(self.scores.past_drops) > len(self.scores.drops_to_repeat)
