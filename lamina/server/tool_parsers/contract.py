"""The contract of tool parsers: each turns the text of a completion into content and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> the JSON schema of its parameters


class Text(NamedTuple):
    """Content."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of the next call. Arguments that follow are its own. ``id``: the model's, if it gives one."""

    name: str
    id: str = ""


class Arguments(NamedTuple):
    """The next piece of the call's arguments. All pieces together are a JSON object, if the model wrote one."""

    text: str


Event = Text | CallBegin | Arguments


class ToolParser(Protocol):
    """Parses one completion. How its text is divided makes no difference to the events, if pieces are joined.

    No content has a part of a call, nor the white space before one. A call whose name never came is content, as
    the model wrote it, unless the completion was cut off in it. Text that might begin a call is held back.
    """

    def push(self, text: str) -> list[Event]:
        """Add text, and return what is certain now."""
        ...

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the rest. ``cut``: a limit has ended the completion, not the model."""
        ...


class Format(NamedTuple):
    """A format of calls."""

    marks: tuple[str, ...]  # texts that are all in the chat templates of the format
    needs_special: bool  # calls begin with special tokens, which texts usually leave out
    begins: Callable[[Tools], tuple[str, ...]]  # texts that begin calls
    open: Callable[[Tools], ToolParser]  # a new parser for one completion
