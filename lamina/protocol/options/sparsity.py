"""The options of sequences that keep some of their KV only (docs/sparsity.md)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lamina.request.params import SPARSITIES

from .declare import OneOf, Options

SCORE_TOKENS = 128  # behind the prompt: so many tokens come before blocks are scored and dropped again


class SparsityOptions(Options, frozen=True, kw_only=True):
    """Which blocks of a sequence are kept in which layers."""

    kv_sparsity: Annotated[
        str,
        OneOf(SPARSITIES),
        "of a sequence's KV: keep and attend all (none); in most layers keep the blocks alone that its last queries "
        "attend most (evict): more sequences fit; or keep all, and let each query attend the blocks alone that may "
        "matter to it (select): a step takes less time. Answers may differ. A request may ask for none",
    ] = "none"
    kv_budget: Annotated[
        int,
        Meta(ge=1),
        "tokens that a sequence keeps in each of these layers (evict), or a query attends (select)",
    ] = 1024
    kv_full_layers: Annotated[int, Meta(ge=0), "with --kv-sparsity: the first layers, in which nothing is left out"] = 1
    kv_sink: Annotated[int, Meta(ge=0), "with --kv-sparsity: the first tokens, which always stay, in whole blocks"] = 4
    kv_recent: Annotated[int, Meta(ge=0), "with --kv-sparsity: the last tokens, which always stay, whole blocks"] = 64

    @property
    def evicts(self) -> bool:
        """Whether blocks are dropped at all."""
        return self.kv_sparsity == "evict"

    @property
    def approximates(self) -> bool:
        """Whether there is either."""
        return self.kv_sparsity != "none"

    @property
    def selects(self) -> bool:
        """Whether queries attend some blocks only."""
        return self.kv_sparsity == "select"

    def check_budget(self, block_size: int) -> None:
        """Raises ValueError where options are for nothing, or the budget has no room for a choice."""
        if not self.approximates:
            own = SparsityOptions()
            for name in ("kv_budget", "kv_full_layers", "kv_sink", "kv_recent"):
                if getattr(self, name) != getattr(own, name):
                    raise ValueError(
                        f"--{name.replace('_', '-')} is for --kv-sparsity evict or select: say one, or leave it out"
                    )
            return
        always = -(-self.kv_sink // block_size) + -(-self.kv_recent // block_size) + 1  # the last block may be begun
        if self.kv_budget < (always + 1) * block_size:
            raise ValueError(
                f"--kv-budget {self.kv_budget} has no room beside --kv-sink {self.kv_sink} and --kv-recent "
                f"{self.kv_recent}, which take {always} blocks of {block_size} tokens: use at least "
                f"{(always + 1) * block_size}"
            )
