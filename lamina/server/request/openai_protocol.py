"""The requests, as pydantic models. Null means the default; strings are not converted to numbers. unsupported_fields.py
lists other fields that a request may have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from lamina.request.bounds import (
    INT64,
    MOST_ITEMS,
    MOST_LABEL,
    MOST_MESSAGES,
    MOST_TEXT,
    MOST_TOKEN,
    MOST_WORD,
)
from lamina.scheduler.sessions.token_ranges import parse_ranges


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1.0 is an integer in JSON


def _truth(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value  # as vLLM reads them


def _false_is_none(value: Any) -> Any:
    return None if value is False else value


def _not_function(role: str) -> str:
    if role == "function":
        raise ValueError("'function' replies to a call of the old form: send role 'tool' with a tool_call_id")
    return role


def _texts(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:  # one error for each form
        raise ValueError("must be a string or a list of strings") from None


def _ranges(pairs: list[list[int]]) -> list[list[int]]:
    parse_ranges(pairs)
    return pairs


Int = Annotated[int, BeforeValidator(_whole), Field(ge=-INT64, le=INT64 - 1)]
Bool = Annotated[bool, BeforeValidator(_truth)]
Word = Annotated[str, Field(max_length=MOST_WORD)]
Label = Annotated[str, Field(max_length=MOST_LABEL)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
Ints = Annotated[list[Int], Field(max_length=MOST_ITEMS)]
Labels = Annotated[list[Label], Field(max_length=MOST_ITEMS)]
Texts = Annotated[list[Text], Field(max_length=MOST_ITEMS)]
Range = Annotated[list[Int], Field(max_length=MOST_WORD)]  # a first token and a stop
Bias = Annotated[float, Field(ge=-100, le=100)]
Variables = Annotated[dict[Label, Any], Field(max_length=MOST_ITEMS)]  # of a chat template


_ID: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MOST_TOKEN}
_IDS: dict[str, Any] = {"type": "array", "items": _ID, "minItems": 1, "maxItems": MOST_TEXT}
_TEXT: dict[str, Any] = {"type": "string", "maxLength": MOST_TEXT}
_SEVERAL = [{"type": "array", "items": form, "minItems": 1, "maxItems": MOST_ITEMS} for form in (_TEXT, _IDS)]
FORMS_OF_PROMPTS: dict[str, Any] = {"anyOf": [_TEXT, _IDS, *_SEVERAL]}


class Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None


class PromptCacheOptions(Strict):
    mode: Literal["implicit", "explicit"] | None = None  # ignored: the prefix cache is searched for every prompt
    ttl: Literal["30m"] | None = None


class Sampling(Strict):
    """The fields that completions and chat share."""

    model: Label | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    n: Int | None = Field(None, ge=1, le=128)
    max_tokens: Int | None = Field(None, ge=0)
    min_tokens: Int | None = Field(None, ge=0)
    stop: Annotated[Text | Texts, WrapValidator(_texts)] | None = None
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: Bool | None = None
    skip_special_tokens: Bool | None = None
    ignore_eos: Bool | None = None
    seed: Int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[dict[Word, Bias], Field(max_length=MOST_ITEMS)] | None = None
    allowed_token_ids: Ints | None = Field(None, min_length=1)
    bad_words: Labels | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    return_tokens_as_token_ids: Bool | None = None
    return_token_ids: Bool | None = None
    prompt_logprobs: Int | None = Field(None, ge=-1)  # -1 = the whole vocabulary
    truncate_prompt_tokens: Int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None  # the end that is cut off; default: left
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    session_id: Word | None = None  # the session whose next turn this is
    kv_discard: Annotated[list[Range], Field(max_length=64), AfterValidator(_ranges)] | None = None
    priority: Int | None = None  # lower numbers come first; default: 0
    prompt_cache_key: str | None = Field(None, max_length=1024)  # starts where earlier requests with this key did
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None  # the least time that KV is kept
    prompt_cache_options: PromptCacheOptions | None = None
    kv_sparsity: Literal["none", "evict", "select"] | None = None  # none: it keeps all of its KV
    response_format: Variables | None = None  # see structured_output.py, as for the next one
    structured_outputs: Variables | None = None  # vLLM's field
    add_special_tokens: Bool | None = None  # default: with a text; a conversation has them from its template


class CompletionRequest(Sampling):
    """POST /v1/completions. ``prompt``: a string, strings, token ids, or lists of token ids."""

    # Checked by prompt_processing.py: a union over long lists is slow and its errors are unreadable.
    prompt: Annotated[Any, WithJsonSchema(FORMS_OF_PROMPTS)] = None
    echo: Bool | None = None
    logprobs: Annotated[Int | None, Field(ge=-1), BeforeValidator(_false_is_none)] = None
    best_of: Int | None = Field(None, ge=0, le=128)


class TextPart(Strict):
    type: Label
    text: Text | None = None


class CalledFunction(Strict):
    name: Label
    arguments: Any = None  # a JSON object as text, or the object; see tool_request.py


class ToolCall(Strict):
    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_not_function)]  # the template knows which
    content: Text | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES)] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_ITEMS)] | None = None
    tool_call_id: Label | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None  # the same


class Function(Strict):
    name: Annotated[str, Field(max_length=128, pattern=r"^[\w.:/-]+$")]
    description: Text | None = None
    parameters: Variables | None = None  # a JSON schema
    strict: Bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: Int | None = Field(None, ge=1)
    add_generation_prompt: Bool | None = None  # default: yes, unless the final message is to be continued
    continue_final_message: Bool | None = None
    echo: Bool | None = None  # the reply begins with the final message, if that is the assistant's
    tools: Annotated[list[Tool], Field(max_length=MOST_ITEMS)] | None = None
    tool_choice: Word | Variables | None = None  # see tool_request.py
    parallel_tool_calls: Bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Word | None = None
    generation_config: Any = None  # see generation_config.py
    logprobs: Bool | None = None
    top_logprobs: Int | None = Field(None, ge=-1)


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt or messages."""

    model: Label | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: Annotated[list[Tool], Field(max_length=MOST_ITEMS)] | None = None  # of a conversation
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Word | None = None
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Label | None = None
    tokens: Annotated[list[Int], Field(max_length=MOST_TEXT)]
