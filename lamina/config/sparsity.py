"""The options of sequences that keep some of their KV only (docs/sparsity.md)."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from lamina.request.sampling_params import KV_SPARSITY_MODES

from .option import Choices, Options

SCORE_TOKENS = 128  # behind the prompt: so many tokens come before blocks are scored and dropped again


class ErrorBudget(NamedTuple):
    """How far answers may be from answers with all KV, in means over tokens, and the share of completions that measure
    it.
    """

    top1: float = 0.1  # share of tokens whose most likely one may be another
    kl: float = 0.1  # nats from the distribution with all KV
    shadow: float = 0.05  # share of completions that are computed with all KV besides


def parse_error_budget(text: str) -> ErrorBudget | None:
    """Of --kv-error-budget; None: there is none. Raises ValueError."""
    if not text:
        return None
    known, given = ErrorBudget._field_defaults, dict[str, float]()
    for part in text.split(",") if text != "default" else ():
        name, _, value = part.strip().partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = 0.0
        if name not in known or not 0.0 < given[name] <= 1.0:
            raise ValueError(
                f"--kv-error-budget {text}: {part.strip()!r} is none of top1=, kl= and shadow= with a number above 0 "
                f"and up to 1, such as top1=0.1,kl=0.1,shadow=0.05; default stands for these"
            )
    return ErrorBudget(**{**known, **given})


class SparsityOptions(Options, frozen=True, kw_only=True):
    """Which blocks of a sequence are kept in which layers."""

    kv_sparsity: Annotated[
        str,
        Choices(KV_SPARSITY_MODES),
        "KV that a sequence keeps and attends: all (none); in most layers only the blocks that its last queries "
        "attend most (evict), so that more sequences fit; or it keeps all, and each query attends only the blocks "
        "that may matter to it (select), so that a step takes less time. Answers may differ. A request may ask for "
        "none",
    ] = "none"
    kv_budget: Annotated[
        int,
        Meta(ge=1),
        "tokens that a sequence keeps in each of these layers (evict), or a query attends (select)",
    ] = 1024
    kv_full_layers: Annotated[int, Meta(ge=0), "with --kv-sparsity: the first layers, in which nothing is left out"] = 1
    kv_sink: Annotated[int, Meta(ge=0), "with --kv-sparsity: the first tokens, which always stay, in whole blocks"] = 4
    kv_recent: Annotated[int, Meta(ge=0), "with --kv-sparsity: the last tokens, which always stay, whole blocks"] = 64
    kv_window: Annotated[
        int,
        Meta(ge=1),
        "with --kv-sparsity evict: tokens at the end of a prompt whose attention decides which of its blocks stay: at "
        "most as many as the question has, as text before the question outvotes it",
    ] = 4
    kv_error_budget: Annotated[
        str,
        "with --kv-sparsity: how far answers may be from answers with all KV, as top1=0.1,kl=0.1,shadow=0.05 "
        "(default): the share of tokens that may differ, nats of KL, and the share of completions that are computed "
        "with all KV too, to measure both. Where it is exceeded, --kv-budget doubles; in the end all KV stays",
    ] = ""

    @property
    def drops_blocks(self) -> bool:
        """Whether blocks are dropped at all."""
        return self.kv_sparsity == "evict"

    @property
    def is_sparse(self) -> bool:
        """Whether there is either."""
        return self.kv_sparsity != "none"

    @property
    def selects_blocks(self) -> bool:
        """Whether queries attend some blocks only."""
        return self.kv_sparsity == "select"

    def check_budget(self, block_size: int) -> None:
        """Raises ValueError where options are for nothing, or the budget has no room for a choice."""
        if not self.is_sparse:
            own = SparsityOptions()
            for name in ("kv_budget", "kv_full_layers", "kv_sink", "kv_recent", "kv_window", "kv_error_budget"):
                if getattr(self, name) != getattr(own, name):
                    raise ValueError(
                        f"--{name.replace('_', '-')} is for --kv-sparsity evict or select: say one, or leave it out"
                    )
            return
        if self.selects_blocks and self.kv_window != SparsityOptions().kv_window:
            raise ValueError(
                "--kv-window says by which rows blocks are chosen that stay, and --kv-sparsity select keeps all: leave "
                "it out, or use evict"
            )
        parse_error_budget(self.kv_error_budget)
        always = -(-self.kv_sink // block_size) + -(-self.kv_recent // block_size) + 1  # the last block may be begun
        if self.kv_budget < (always + 1) * block_size:
            raise ValueError(
                f"--kv-budget {self.kv_budget} has no room beside --kv-sink {self.kv_sink} and --kv-recent "
                f"{self.kv_recent}, which take {always} blocks of {block_size} tokens: use at least "
                f"{(always + 1) * block_size}"
            )
