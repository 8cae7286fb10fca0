"""Tools of a request: how the model gets them, how its calls are read, and the errors that name these fields."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from lamina.grammar.lark import one_of
from lamina.grammar.vocabulary import special_tokens
from lamina.request import SamplingParams
from lamina.request.structured_outputs import StructuredOutputsParams
from lamina.server.errors import ApiError
from lamina.server.journal.journal_records import ToolUse
from lamina.server.tool_parsers import FORCED, format_of

from .openai_protocol import ChatRequest, Message, TokenizeRequest, Tool, ToolCall

CHOICES = ("none", "auto", "required")
_ROOT = "#/$defs/"


def tool_use_of(body: ChatRequest, parser: str | None) -> ToolUse | None:
    """Return how the calls of a completion are read; None if it may have none. ``parser``: of the model's own format.
    Raises ApiError.
    """
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    choice, name = _choice_of(body)
    if len(tools) != len(body.tools or ()):
        names = [tool.function.name for tool in body.tools or ()]
        twice = next(one for one in names if names.count(one) > 1)
        raise _error(f"tools has the function {twice!r} twice: give each its own name", "tools")
    if choice in ("required", "named") and not tools:
        raise _error("tool_choice needs tools: send them, or leave it out", "tool_choice")
    if choice == "none" or not tools:
        return None
    parallel = body.parallel_tool_calls is not False
    if choice == "auto":
        if parser is None:
            text = "no tool parser reads this model's chat template: the server needs --tool-call-parser; "
            raise _error(f"{text}or send tool_choice required or none", "tools")
        return ToolUse(parser=parser, tools=tools, parallel=parallel)
    if choice == "named":
        if name not in tools:
            raise _error(f"tool_choice names {name[:64]!r}, which tools does not have", "tool_choice")
        tools = {name: tools[name]}
    return ToolUse(parser=choice, tools=tools, parallel=parallel)


def _choice_of(body: ChatRequest) -> tuple[str, str]:
    """Return one of CHOICES, or "named" and the name."""
    given = body.tool_choice
    if given is None:
        return "auto", ""
    if given in CHOICES:
        return str(given), ""
    if isinstance(given, dict) and given.get("type") == "function":
        function = given.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return "named", function["name"]
    form = '{"type": "function", "function": {"name": ...}}'
    raise _error(f"tool_choice must be {', '.join(CHOICES)} or {form}, not {str(given)[:64]!r}", "tool_choice")


def structure_of_calls(use: ToolUse | None) -> StructuredOutputsParams | None:
    """Return the structure of a completion that must call functions; None where it need not. Raises ApiError."""
    if use is None or use.parser not in FORCED:
        return None
    schemas = {name: schema or {"type": "object"} for name, schema in use.tools.items()}
    try:
        if use.parser == "named":
            return StructuredOutputsParams(json=next(iter(schemas.values())))
        return StructuredOutputsParams(json=_schema_of_list(schemas, 0 if use.parallel else 1))
    except ValueError as e:
        raise tool_error(str(e)) from e


def _schema_of_list(schemas: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the schema of a list of calls, at most ``most`` (0: any number). Parameters are definitions of their own,
    so their references stay within them.
    """
    definitions = {f"function{i}": _moved(schema, f"{_ROOT}function{i}") for i, schema in enumerate(schemas.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"{_ROOT}function{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, name in enumerate(schemas)
    ]
    limit = {"maxItems": most} if most else {}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": definitions}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references begin at ``root``."""
    if isinstance(schema, dict):
        is_reference = isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#")
        moved = {name: _moved(value, root) for name, value in schema.items()}
        return moved | {"$ref": root + schema["$ref"][1:]} if is_reference else moved
    return [_moved(value, root) for value in schema] if isinstance(schema, list) else schema


def set_tools(params: SamplingParams, use: ToolUse | None) -> None:
    """Change ``params`` so that the calls can be read. Calls that must come replace a structure of the answer, as in
    vLLM. Raises ApiError.
    """
    if use is None:
        return
    if format_of(use.parser).needs_special:
        params.skip_special_tokens = False
    params.structured_outputs = structure_of_calls(use) or params.structured_outputs


def rules_of_calls(use: ToolUse | None, tokenizer: Any) -> str:
    """Return the rules of Lark for calls that a model may write in place of a structured answer; "" for none."""
    if use is None or use.parser in FORCED:
        return ""
    return one_of("calls", format_of(use.parser).begins(use.tools), special_tokens(tokenizer))


def tool_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the tools for the chat template; nothing where the model is to call none."""
    if not body.tools or (isinstance(body, ChatRequest) and body.tool_choice == "none"):
        return {}
    return {"tools": [_given(tool) for tool in body.tools]}


def _given(tool: Tool) -> dict[str, Any]:
    given = tool.model_dump(exclude_unset=True)
    given["function"].setdefault("parameters", {"type": "object", "properties": {}})
    given["function"].setdefault("description", "")
    return given


def check_history(messages: list[Message]) -> None:
    """Check that each reply of a tool has its call. Raises ApiError."""
    known = set[str]()
    for i, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            where = f"messages.{i}.tool_calls"
            raise _error(f"{where}: only the assistant calls tools, not {message.role!r}", where)
        known |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in known:
            where = f"messages.{i}.tool_call_id"
            raise _error(f"{where} must be the id of a call in an earlier message", where)


def template_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Return a call of the history for the chat template, with arguments as an object. Raises ApiError."""
    given, value = call.function.arguments, None
    with suppress(ValueError, RecursionError):
        value = json.loads(given or "{}") if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise _error(f"{where}.function.arguments must be a JSON object, or text of one", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": value}}


def tool_error(text: str) -> ApiError:
    """Return the error of a grammar by the field that the client sent."""
    text = re.sub(r"\$defs\.function(\d+)\b", r"tools.\1.function.parameters", text)
    return _error(text.replace("structured_outputs.json", "tools").replace("structured_outputs", "tools"), "tools")


def _error(text: str, param: str) -> ApiError:
    return ApiError(400, text, param=param, code="invalid_value")
