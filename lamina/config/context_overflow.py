"""The options of conversations that are longer than the context."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .flag_groups import flag_text
from .option import Choices, Options

PAGE_TOKENS = 128  # kv.pages.PAGE, which is above
OVERFLOWS = ("refuse", "truncate")


class OverflowOptions(Options, frozen=True, kw_only=True):
    """The options for a prompt that is too long, and for its session's KV."""

    context_overflow: Annotated[
        str,
        Choices(OVERFLOWS),
        "what happens to a prompt that is longer than the context: refuse, or truncate, which discards a part after "
        "its beginning; a session keeps the rest of its KV",
    ] = "refuse"
    truncate_ratio: Annotated[float, Meta(gt=0.0, lt=0.75), "part of the context that is discarded each time"] = 0.5
    keep_first: Annotated[int, Meta(ge=0), "first tokens that are never discarded, a multiple of 128"] = PAGE_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_first % PAGE_TOKENS:
            raise ValueError(
                f"{flag_text('keep_first', self.keep_first)} is not whole pages: use a multiple of {PAGE_TOKENS}"
            )

    @property
    def truncates_context(self) -> bool:
        """True if a prompt that is too long is served."""
        return self.context_overflow == "truncate"
