"""The options of sequences that keep some of their KV only (docs/sparsity.md)."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from lamina.request.sampling_params import KV_SPARSITY_MODES

from .flag_groups import ERROR_BUDGET, flag_name
from .option import Choices, Options

SCORE_TOKENS = 128  # after the prompt: so many tokens come before blocks are scored and dropped again


class ErrorBudget(NamedTuple):
    """The distance that answers may have from answers with all KV, in means over tokens. A share of the completions
    measures it.
    """

    top1: float = 0.1  # share of tokens whose most likely one may be another
    kl: float = 0.1  # nats from the distribution with all KV
    shadow: float = 0.05  # share of completions that are computed with all KV besides


def parse_error_budget(text: str) -> ErrorBudget | None:
    """Parses ``kv_error_budget``; None: there is none. Raises ValueError."""
    if not text:
        return None
    given = dict[str, float]()
    for part in text.split(",") if text != "default" else ():
        name, _, value = part.strip().partition("=")
        try:
            given[name] = float(value) if name in ErrorBudget._fields else float("")
        except ValueError:
            raise ValueError(
                f"kv_error_budget {text}: {part.strip()!r} is none of top1=, kl= and shadow= with a number, such as "
                f"{ERROR_BUDGET}; default stands for these"
            ) from None
        if not 0.0 < given[name] <= 1.0:
            raise ValueError(f"{flag_name(f'kv_error_budget.{name}')} must be above 0 and at most 1, not {value}")
    return ErrorBudget(**given)


class SparsityOptions(Options, frozen=True, kw_only=True):
    """The options of the blocks that a sequence keeps, by layers."""

    kv_sparsity: Annotated[
        str,
        Choices(KV_SPARSITY_MODES),
        "KV that a sequence keeps and attends. none: all. evict: in most layers it keeps only the blocks that its last "
        "queries attend most, so that more sequences fit. select: it keeps all, and each query attends only the blocks "
        "that may matter to it, so that a step takes less time. Answers may differ. A request may ask for none",
    ] = "none"
    kv_budget: Annotated[
        int,
        Meta(ge=1),
        "tokens that a sequence keeps in each of these layers (evict), or a query attends (select)",
    ] = 1024
    kv_full_layers: Annotated[int, Meta(ge=0), "the first layers, in which nothing is left out"] = 1
    kv_sink: Annotated[int, Meta(ge=0), "the first tokens, which always stay, in whole blocks"] = 4
    kv_recent: Annotated[int, Meta(ge=0), "the last tokens, which always stay, whole blocks"] = 64
    kv_observation_window: Annotated[
        int,
        Meta(ge=1),
        "tokens at the end of a prompt whose attention decides which of its blocks stay: at "
        "most as many as the question has, as text before the question outvotes it",
    ] = 4
    kv_error_budget: Annotated[
        str,
        "how far answers may be from answers with all KV; the default is top1=0.1,kl=0.1,shadow=0.05. top1: the share "
        "of tokens that may differ; kl: nats of KL. shadow: the share of completions that are also computed with all "
        "KV, to measure both. If the budget is exceeded, kv_budget doubles; in the end all KV stays",
    ] = ""

    @property
    def drops_blocks(self) -> bool:
        """True if blocks are dropped."""
        return self.kv_sparsity == "evict"

    @property
    def is_sparse(self) -> bool:
        """True if blocks are dropped or selected."""
        return self.kv_sparsity != "none"

    @property
    def selects_blocks(self) -> bool:
        """True if queries attend some blocks only."""
        return self.kv_sparsity == "select"

    def check_budget(self, block_size: int) -> None:
        """Raises ValueError where blocks are left out and the budget has no room for a choice."""
        if not self.is_sparse:
            return
        parse_error_budget(self.kv_error_budget)
        always = -(-self.kv_sink // block_size) + -(-self.kv_recent // block_size) + 1  # the last block may be begun
        if self.kv_budget < (always + 1) * block_size:
            raise ValueError(
                f"--kv-sparsity {self.kv_sparsity}:budget={self.kv_budget} has no room after sink={self.kv_sink} and "
                f"recent={self.kv_recent}, which take {always} blocks of {block_size} tokens: use at least "
                f"{(always + 1) * block_size}"
            )
