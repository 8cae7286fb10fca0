"""vLLM's classes of tool parsers, over Lamina's: what its tests say of texts holds for any parser of a format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lamina.server.tool_parsers import TOOL_PARSERS
from lamina.server.tool_parsers.contract import CallBegin, Event, Text


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class FunctionDefinition(Open):
    name: str
    parameters: dict[str, Any] | None = None


class ChatCompletionToolsParam(Open):
    type: str = "function"
    function: FunctionDefinition


class ChatCompletionRequest(Open):
    messages: list[Any] = []
    tools: list[ChatCompletionToolsParam] | None = None


class FunctionCall(Open):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Open):
    id: str | None = None
    index: int = 0
    type: str | None = "function"
    function: FunctionCall


class DeltaMessage(Open):
    content: str | None = None
    tool_calls: list[ToolCall] = []


class ExtractedToolCallInformation(Open):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class Characters:
    """A tokenizer of characters: each mark of a format comes in many pieces."""

    def get_vocab(self) -> dict[str, int]:
        return {}

    def tokenize(self, text: str) -> list[str]:
        return list(text)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, ids: Iterable[int], **options: Any) -> str:
        return "".join(map(chr, ids))


def _named_in_test() -> dict[str, dict[str, Any]]:
    """The functions that the running test may mean: many declare none, and some formats of ours find no other name."""
    source = Path(os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]).read_text()
    return {a or b: {} for a, b in re.findall(r"\b([A-Za-z_]\w*)\(|name\W+(\w+)", source)}


class ToolParser:
    """``vllm.tool_parsers.ToolParser``; a subclass names the format."""

    format = ""

    def __init__(self, tokenizer: Any, tools: Iterable[Any] | None = None) -> None:
        self.model_tokenizer, self.vocab = Characters(), dict[str, int]()
        self._tools = list(tools or ())
        self._parser = self._open(None)
        self._count = 0  # of calls that have begun

    def adjust_request(self, request: Any) -> Any:
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        parser = self._open(request)
        self._count = 0
        delta = self._message([*parser.push(model_output), *parser.finish()])
        calls = [call.model_copy(update={"index": 0}) for call in delta.tool_calls]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=delta.content)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *others: Any, **more: Any
    ) -> DeltaMessage | None:
        if not previous_text and current_text == delta_text:
            self._parser = self._open(more["request"] if "request" in more else others[-1])
            self._count = 0
        delta = self._message(self._parser.push(delta_text))
        return delta if delta.content or delta.tool_calls else None

    def _open(self, request: Any) -> Any:
        tools = [getattr(each, "function", each) for each in getattr(request, "tools", None) or self._tools]
        return TOOL_PARSERS[self.format].open({each.name: each.parameters or {} for each in tools} or _named_in_test())

    def _message(self, events: list[Event]) -> DeltaMessage:
        content, calls = "", list[ToolCall]()
        for event in events:
            if isinstance(event, Text):
                content += event.text
            elif isinstance(event, CallBegin):
                named = FunctionCall(name=event.name, arguments="")
                calls.append(ToolCall(id=event.id or f"call_{self._count}", index=self._count, function=named))
                self._count += 1
            elif calls:
                calls[-1].function.arguments = (calls[-1].function.arguments or "") + event.text
            else:
                more = FunctionCall(arguments=event.text)
                calls.append(ToolCall(type=None, index=self._count - 1, function=more))
        return DeltaMessage(content=content or None, tool_calls=calls)


def _of(format: str) -> type[ToolParser]:
    return type(f"{format}_parser", (ToolParser,), {"format": format})


CLASSES = {name: _of(name) for name in TOOL_PARSERS}
CLASSES["glm47"] = CLASSES["glm45"]


class ToolParserManager:
    """``vllm.tool_parsers.ToolParserManager``. Raises KeyError as that one does."""

    @staticmethod
    def get_tool_parser(name: str) -> type[ToolParser]:
        return CLASSES[name]


# Module of vLLM -> its class and our format.
_HOMES = {
    "hermes_tool_parser": ("Hermes2ProToolParser", "hermes"),
    "granite4_tool_parser": ("Granite4ToolParser", "granite4"),
    "qwen3_engine_tool_parser": ("Qwen3EngineToolParser", "qwen3_coder"),
    "kimi_k2_tool_parser": ("KimiK2ToolParser", "kimi_k2"),
    "glm47_moe_tool_parser": ("Glm47MoeModelToolParser", "glm45"),
    "minimax_m2_tool_parser": ("MinimaxM2ToolParser", "minimax_m2"),
    "deepseekv31_tool_parser": ("DeepSeekV31ToolParser", "deepseek_v31"),
    "llama_tool_parser": ("Llama3JsonToolParser", "llama3_json"),
}
_MESSAGES = {each.__name__: each for each in (DeltaMessage, ExtractedToolCallInformation, FunctionCall, ToolCall)}
_REQUESTS = {each.__name__: each for each in (ChatCompletionRequest, ChatCompletionToolsParam, FunctionDefinition)}
NAMES: dict[str, dict[str, Any]] = {
    "vllm.tool_parsers": {"ToolParser": ToolParser, "ToolParserManager": ToolParserManager},
    "vllm.tool_parsers.abstract_tool_parser": {"ToolParser": ToolParser},
    "vllm.entrypoints.generate.base.protocol": _MESSAGES,
    "vllm.entrypoints.openai.chat_completion.protocol": _REQUESTS,
    **{f"vllm.tool_parsers.{home}": {name: CLASSES[format]} for home, (name, format) in _HOMES.items()},
}
