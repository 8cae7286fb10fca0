"""The slower path: this process gets the logits of a step, transformers' own processors change them, its criteria end
rows.

Processors and criteria get the same input as in transformers, one step at a time: all rows of the call in order, with
padding, finished ones too. Draws use torch's generator as transformers does: the same seed gives the same tokens.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_outputs import CausalLMOutputWithPast

from lamina.api.llm import LLM
from lamina.engine.lockstep import Lockstep
from lamina.models.cache_name import cache_name

from .generate_call import GenerateCall


class GeneratedRows(NamedTuple):
    """``ids`` [rows, length + new]. For each step: the scores after all processors, and the logits before them, [rows,
    vocabulary] fp32 each. None if the call does not request them.
    """

    ids: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None


def generate_by_step(llm: LLM, call: GenerateCall, own: tuple[object, ...]) -> GeneratedRows:
    """Decode until all rows have ended. ``own``: the model, under all its names. Raises the errors of processors and
    criteria; other calls are not affected.
    """
    with ExitStack() as stack:
        rows = stack.enter_context(llm.lockstep(call.prompts, call.max_new_tokens))
        for processor in call.processors:
            guides = isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
            if guides and any(processor.model is one for one in own):
                stack.callback(setattr, processor, "model", processor.model)
                processor.model = _AuxiliaryModel(llm, call, stack)
        return _loop(rows, call)


def _loop(rows: Lockstep, call: GenerateCall) -> GeneratedRows:
    config, ids = call.config, call.ids
    asked = config.return_dict_in_generate
    scores: tuple[Tensor, ...] | None = () if asked and config.output_scores else None
    logits: tuple[Tensor, ...] | None = () if asked and config.output_logits else None
    going = torch.ones(len(ids), dtype=torch.long, device=ids.device)
    while True:
        raw = _tensor(rows.logits()).to(ids.device)
        changed = call.processors(ids, raw)
        scores = None if scores is None else (*scores, changed)
        logits = None if logits is None else (*logits, raw)
        tokens = _pick(changed, sample=bool(config.do_sample))
        if call.end_token_ids is not None:
            tokens = tokens * going + call.pad_token_id * (1 - going)
        ids = torch.cat([ids, tokens[:, None]], dim=-1)
        going = going & ~call.criteria(ids, scores)
        if call.streamer is not None:
            call.streamer.put(tokens.cpu())
        if not going.any():
            return GeneratedRows(ids, scores, logits)
        rows.choose(tokens.tolist())


def _pick(scores: Tensor, *, sample: bool) -> Tensor:
    if not sample:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


def _tensor(rows: list[bytes]) -> Tensor:
    """Return the logits of all rows, [rows, vocabulary] fp32."""
    return torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in rows])


class _AuxiliaryModel:
    """Replaces the model for a processor that needs the logits of other prompts, a step at a time."""

    def __init__(self, llm: LLM, call: GenerateCall, stack: ExitStack) -> None:
        self._llm, self._call, self._stack = llm, call, stack

    def __call__(self, ids: Tensor, *, attention_mask: Tensor, **options: Any) -> CausalLMOutputWithPast:
        """Return logits of the last position. The rows are returned as the cache; the next call passes them back."""
        rows = next((value for value in options.values() if isinstance(value, Lockstep)), None)
        if rows is None:
            prompts = [row[kept].tolist() for row, kept in zip(ids, attention_mask.bool(), strict=True)]
            rows = self._stack.enter_context(self._llm.lockstep(prompts, self._call.max_new_tokens))
        else:
            rows.choose(ids[:, -1].tolist())
        logits = _tensor(rows.logits())[:, None].to(ids.device)
        return CausalLMOutputWithPast(logits=logits, **{cache_name(): rows})
