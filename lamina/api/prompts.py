"""Checks prompts and sampling parameters in every accepted form; other values raise an error of one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from lamina.request import SamplingParams

# Text, token ids, or a mapping with "prompt" or "prompt_token_ids" as in other engines.
Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = "text, token ids, or a list of those"


def prompt_list(prompts: Any) -> list[str | list[int]]:
    """Return one prompt or several as a list. Raises ValueError for anything that is no prompt."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt(prompts)]
    try:
        several = list(prompts)
    except TypeError:
        raise ValueError(f"prompts must be {FORMS}, not {type(prompts).__name__}") from None
    return [_prompt(p) for p in several]


def params_list(count: int, params: Any) -> list[SamplingParams]:
    """Return sampling parameters for each of ``count`` prompts. Raises ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError("sampling_params must be a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: pass one, or one for each")
    return list(params)


def priority_list(count: int, priority: Any) -> list[int]:
    """Return a priority for each of ``count`` prompts; None is 0. Raises ValueError for non-integers and a wrong number
    of them.
    """
    each = list(priority) if isinstance(priority, list | tuple) else [0 if priority is None else priority] * count
    if not all(isinstance(p, Integral) for p in each):
        raise ValueError(f"priority must be a whole number, or a list with one for each prompt, not {priority!r}")
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts: pass one number, or one for each")
    return [int(p) for p in each]


def conversation_list(messages: Any) -> list[list[dict[str, Any]]]:
    """Return one conversation or several as a list. Raises ValueError for anything else."""
    if _is_conversation(messages):
        return [list(messages)]
    if isinstance(messages, Sequence) and messages and all(_is_conversation(m) for m in messages):
        return [list(m) for m in messages]
    raise ValueError('messages must be a list of {"role": ..., "content": ...}, or a list of such lists')


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        contents = [prompt[k] for k in ("prompt_token_ids", "prompt") if prompt.get(k) is not None]
        if not contents or isinstance(contents[0], Mapping):
            raise ValueError('a prompt that is a mapping needs "prompt" (text) or "prompt_token_ids"')
        return _prompt(contents[0])
    if isinstance(prompt, str):
        return prompt
    if not _is_ids(prompt):
        raise ValueError(f"a prompt must be text or token ids, not {_words(prompt)}")
    return [int(t) for t in prompt]


def _is_ids(value: Any) -> bool:
    """Return True for a list of whole numbers, or a flat integer array of numpy or torch."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and (
        all(isinstance(t, int) or (hasattr(t, "__index__") and not hasattr(t, "__len__")) for t in value)
        and len(value) > 0
    )  # fmt: skip


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def _words(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"a list of {type(value[0]).__name__}" if len(value) else "an empty list"
    return type(value).__name__
