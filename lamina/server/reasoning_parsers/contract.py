"""The contract of reasoning parsers: each says for each piece of a completion's text what is reasoning."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from lamina.grammar.lark import Specials


class Parts(NamedTuple):
    """Pieces of text. Both may be empty."""

    reasoning: str
    answer: str


class ReasoningParser(Protocol):
    """Parses one completion. How its text is divided makes no difference, if pieces are joined. Marks belong to
    neither part. Spaces around the reasoning are left out.
    """

    has_ended: bool  # all that follows is the answer

    def rules_before(self, specials: Specials) -> str:
        """Return rules of Lark for a new completion: ``before`` for all up to the answer, ``lead`` for all up to calls;
        "" if the answer begins at once.
        """
        ...

    def push(self, text: str) -> Parts:
        """Add text, and return what is certain now."""
        ...

    def finish(self, *, cut: bool = False) -> Parts:
        """Return the rest. ``cut``: a limit has ended the completion, so what begins a mark is no answer."""
        ...


class ReasoningFormat(NamedTuple):
    """A format of reasoning."""

    marks: tuple[str, ...]  # a model that reasons has one of them in its chat template or vocabulary
    has_special: bool  # marks may be special tokens, which texts usually leave out
    open: Callable[[str], ReasoningParser]  # a new parser for one completion, by the last characters of its prompt
