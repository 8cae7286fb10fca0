"""Takes a chat completion's text apart into reasoning, content and tool calls, as OpenAI's messages have them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from lamina.grammar.vocabulary import special_tokens
from lamina.server.journal.journal_records import AcceptedRecord
from lamina.server.reasoning_parsers import REASONING_PARSERS
from lamina.server.tool_parsers import format_of
from lamina.server.tool_parsers.contract import CallBegin, Event, Text

END_TOKENS = 16  # of a prompt: enough to show whether it begins or ends reasoning
ID_DIGITS = 9  # of a call's id: letters and digits, which Mistral's templates demand


def prompt_end_of(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the last characters of a prompt, with special tokens."""
    return str(tokenizer.decode(list(prompt[-END_TOKENS:]), skip_special_tokens=False))


def rules_before(reasoning: str, tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the rules of Lark for what comes before the answer to a prompt. ``reasoning``: the name of its parser."""
    return REASONING_PARSERS[reasoning].open(prompt_end_of(tokenizer, prompt)).rules_before(special_tokens(tokenizer))


class MessageReader:
    """Reads one completion. Its parts are those of a chunk's delta."""

    def __init__(self, record: AcceptedRecord, index: int, prompt_end: str) -> None:
        """``index``: of the completion. ``prompt_end``: the last characters of its prompt."""
        use = record.tool_use
        self._reasoning = REASONING_PARSERS[record.reasoning].open(prompt_end) if record.reasoning else None
        self._tools = format_of(use.parser).open(use.tools) if use is not None else None
        self._most = 1 if use is not None and not use.parallel else None  # calls of the answer; None: any number
        self._name = f"{record.id}/{index}"
        self._num_calls = 0

    def delta(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return the next piece as a delta: ``reasoning``, ``content`` and ``tool_calls`` where there are any.
        ``finish_reason``: the engine's, with the last piece.
        """
        parts = dict[str, Any]()
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            if finish_reason is not None:
                more, rest = self._reasoning.finish(cut=finish_reason != "stop")
                reasoning, text = reasoning + more, text + rest
        if reasoning:
            parts |= {"reasoning": reasoning, "reasoning_content": reasoning}
        events: list[Event] = [Text(text)] if text else []
        if self._tools is not None:
            is_answer = self._reasoning is None or self._reasoning.has_ended
            events = self._tools.push(text) if text or is_answer else []
            if finish_reason is not None:
                events += self._tools.finish(cut=finish_reason != "stop")
        for event in events:
            self._add(event, parts)
        return parts

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the reason for the client: a completion that ended by itself after a call ends for that call."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _add(self, event: Event, parts: dict[str, Any]) -> None:
        if isinstance(event, Text):
            parts["content"] = parts.get("content", "") + event.text
            return
        if isinstance(event, CallBegin):
            self._num_calls += 1
        if self._most is not None and self._num_calls > self._most:
            return
        calls, index = parts.setdefault("tool_calls", []), self._num_calls - 1
        if isinstance(event, CallBegin):
            digest = sha256(f"{self._name}/{index}".encode()).hexdigest()
            function = {"name": event.name, "arguments": ""}
            id = event.id or digest[:ID_DIGITS]
            calls.append({"index": index, "id": id, "type": "function", "function": function})
            return
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += event.text


def one_call_each(delta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a delta as several, each with a piece of at most one call: some clients read no more of a chunk."""
    first, *others = delta.get("tool_calls") or [None]
    return [delta | ({"tool_calls": [first]} if others else {}), *({"tool_calls": [call]} for call in others)]


def message_of(delta: dict[str, Any]) -> dict[str, Any]:
    """Return a whole completion's delta as the fields of a message."""
    message: dict[str, Any]
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    content = delta.get("content", None if calls else "")
    message = {name: delta[name] for name in ("reasoning", "reasoning_content") if name in delta}
    return {"content": content, **message, **({"tool_calls": calls} if calls else {})}
