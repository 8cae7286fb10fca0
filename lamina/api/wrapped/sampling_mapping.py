"""Maps the settings of a call to SamplingParams, if workers can draw its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lamina.request import FILTERS, SamplingParams

from .generate_call import GenerateCall


def repetition_penalty_of(processor: Any, call: GenerateCall) -> dict[str, Any] | None:
    """Map a repetition penalty. Padding of a prompt never counts here; in transformers the processor must ignore it
    too.
    """
    padding: Tensor = call.mask.logical_not().sum(1)
    ignored = processor.prompt_ignore_length
    alike = not padding.any() if ignored is None else isinstance(ignored, Tensor) and torch.equal(ignored, padding)
    return {"repetition_penalty": processor.penalty} if alike and 0.01 <= processor.penalty <= 100.0 else None


# Stages in the order of the workers. Each returns fields of SamplingParams, or None if workers cannot do it.
_STAGES: list[dict[type, Callable[[Any, GenerateCall], dict[str, Any] | None]]] = [
    {RepetitionPenaltyLogitsProcessor: repetition_penalty_of},
    {
        MinLengthLogitsProcessor: lambda p, call: {"min_tokens": max(0, p.min_length - call.length)},
        MinNewTokensLengthLogitsProcessor: lambda p, _: {"min_tokens": p.min_new_tokens},
    },
    {TemperatureLogitsWarper: lambda p, _: {"temperature": p.temperature}},
    {
        TopKLogitsWarper: lambda p, call: {"top_k": p.top_k if p.top_k < call.vocabulary else 0},
        TopPLogitsWarper: lambda p, _: {"top_p": p.top_p} if p.top_p > 0 else None,
        MinPLogitsWarper: lambda p, _: {"min_p": p.min_p},
    },
    {LogitNormalization: lambda p, call: {}},  # the same tokens
]
_FIELDS = {TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p", MinPLogitsWarper: "min_p"}
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


def sampling_params_of(call: GenerateCall) -> list[SamplingParams] | None:
    """Return parameters for each row, with seeds from torch's generator; None if workers cannot draw the
    call's tokens.
    """
    several = call.streamer is not None and len(call.ids) > 1
    if call.own_hooks or call.returns_logits or several or any(type(c) not in _CRITERIA for c in call.criteria):
        return None
    fields = _fields(call)
    if fields is None:
        return None
    if not call.config.do_sample:
        return [SamplingParams(**fields | {"temperature": 0.0})] * len(call.ids)
    seeds = torch.randint(1 << 62, (len(call.ids),)).tolist()
    return [SamplingParams(**fields, seed=seed) for seed in seeds]


def _fields(call: GenerateCall) -> dict[str, Any] | None:
    stage, order = 0, list[str]()
    fields: dict[str, Any] = {"min_tokens": 0}
    for processor in call.processors:
        kind = type(processor)
        stage = next((s for s in range(stage, len(_STAGES)) if kind in _STAGES[s]), len(_STAGES))
        stage_fields = _STAGES[stage][kind](processor, call) if stage < len(_STAGES) else None
        if stage_fields is None:
            return None
        fields |= stage_fields | {"min_tokens": max(fields["min_tokens"], stage_fields.get("min_tokens", 0))}
        order += [_FIELDS[kind]] if kind in _FIELDS else []
    return fields | {
        "min_tokens": min(fields["min_tokens"], call.max_new_tokens),
        "max_tokens": call.max_new_tokens,
        "filter_order": (*order, *(name for name in FILTERS if name not in order)),
        "stop_token_ids": [i for i in call.end_token_ids or [] if 0 <= i < call.vocabulary],  # the rest is never drawn
        "ignore_eos": True,  # only the end tokens of this call count
    }


def assemble_output(call: GenerateCall, completions: list[list[int]]) -> Tensor:
    """Return [rows, length + the longest]: prompts as given, completions, padding."""
    longest = max(map(len, completions))
    new = torch.tensor([c + [call.pad_token_id] * (longest - len(c)) for c in completions], device=call.ids.device)
    return torch.cat([call.ids, new], dim=1)
