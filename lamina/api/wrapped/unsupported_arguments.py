"""Arguments of transformers' ``generate`` that a wrapped model refuses: each by name, in one line, with a
replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lamina.models.cache_name import cache_name

_OWN = "or use the model's own generate: split.model.generate(...)"
# Arguments that are refused with every value but None and False.
_ARGUMENTS = {
    "inputs_embeds": f"prompts are token ids: pass input_ids, {_OWN}",
    "assistant_model": "leave it out, greedy tokens are the same without it",
    "custom_generate": f"the loop is Lamina's: pass logits_processor or stopping_criteria, {_OWN}",
    "synced_gpus": "one process decodes here: leave it out",
}
# Refused settings, also of a GenerationConfig.
_SETTINGS = {
    "token_healing": "pass split.model.heal_tokens(input_ids, tokenizer) as input_ids",
    "prompt_lookup_num_tokens": "leave it out, greedy tokens are the same without it",
    "penalty_alpha": f"contrastive search is not supported: leave it out, {_OWN}",
    "dola_layers": f"DoLa is not supported: leave it out, {_OWN}",
    "constraints": f"constrained beam search is not supported: leave it out, {_OWN}",
    "force_words_ids": f"constrained beam search is not supported: leave it out, {_OWN}",
    "use_mtp": f"leave it out, {_OWN}",
    "is_assistant": f"a wrapped model assists no other: leave it out, {_OWN}",
}
_CACHES = {
    "quantized": 'pass kv_cache_dtype="int8" to lamina.wrap, for K and V in 8 bits',
    "paged": "leave it out, the cache is paged on the memory workers",
    "offloaded": "leave it out, the cache is on the memory workers, not on this process's device",
}
_OTHER_CACHE = f"the KV cache lies on the memory workers: pass the whole text as input_ids, {_OWN}"
# transformers passes these to the decoding loop with every call, and none changes a token here.
_HARMLESS = {"use_cache", "logits_to_keep", "position_ids", "attention_mask"}


def check_arguments(arguments: dict[str, Any], configs: list[Any]) -> None:
    """Check arguments before transformers prepares the call. ``configs``: the call's GenerationConfig and the model's,
    None for none. Raises ValueError.
    """
    cache_names = {"past_key_values", cache_name()}
    for name, value in arguments.items():
        if isinstance(value, Cache) or (name in cache_names and value is not None):
            raise ValueError(f"generate does not take {name} here: {_OTHER_CACHE}")
    for name, way_out in _ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"generate does not take {name} here: {way_out}")
    for name, way_out in _SETTINGS.items():
        value = generation_setting(name, arguments, configs)
        if value is not None and value is not False:
            raise ValueError(f"generate cannot obey {name} here: {way_out}")
    beams = generation_setting("num_beams", arguments, configs) or 1
    if beams != 1 or (generation_setting("num_beam_groups", arguments, configs) or 1) != 1:
        raise ValueError(f"generate cannot obey num_beams={beams}: pass num_beams=1, {_OWN}")
    cache = generation_setting("cache_implementation", arguments, configs)
    if cache in _CACHES:
        raise ValueError(f'generate cannot obey cache_implementation="{cache}": {_CACHES[cache]}')


def generation_setting(name: str, arguments: dict[str, Any], configs: list[Any]) -> Any:
    """Return the value that transformers uses: a keyword, else that of the first configuration that has one."""
    if name in arguments:
        return arguments[name]
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def check_prepared(config: Any, inputs: dict[str, Any], ids: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Check the call that transformers has prepared from ``arguments``; returns the mask. ``ids`` and mask [rows,
    length]. Raises ValueError.
    """
    if ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape:
        raise ValueError(f"input_ids must be token ids [batch, length], not {list(ids.shape)} of {ids.dtype}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise ValueError(f"generate cannot obey {name} here: workers keep none of them; leave it out, {_OWN}")
        inputs.pop(name, None)
    if others := [name for name, value in inputs.items() if name not in _HARMLESS and _says_something(value)]:
        raise ValueError(f"generate does not take {', '.join(others)} here: leave it out, {_OWN}")
    return _checked_mask(ids, inputs.get("attention_mask"), arguments)


def _says_something(value: Any) -> bool:
    """Return False for a value without information about the text: None, an empty collection, and the empty cache that
    transformers makes for each call. ``check_arguments`` has refused the caller's own cache.
    """
    if isinstance(value, Mapping | list | tuple | set):
        return bool(value)
    return value is not None and not isinstance(value, Cache)


def _checked_mask(ids: Tensor, prepared: Tensor | None, arguments: dict[str, Any]) -> Tensor:
    """Check the mask, and return it. ``prepared``: None if all tokens count, also if the caller's own mask has another
    length.
    """
    given, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    mask = torch.ones_like(ids) if prepared is None else prepared
    if mask.shape != ids.shape or (given is not None and given.shape[-1] != ids.shape[1]):
        shape = list(mask.shape if given is None else given.shape)
        raise ValueError(f"attention_mask {shape} does not fit input_ids {list(ids.shape)}")
    if not bool((mask.long().diff(dim=1) >= 0).all() and mask[:, -1].all()):
        raise ValueError(
            "attention_mask must be 0 on the left and 1 from there on: pad with tokenizer.padding_side='left'"
        )
    counted = mask.long().cumsum(-1) - 1
    if positions is not None and not _counts(positions, counted, mask):
        raise ValueError(f"position_ids must count the tokens of each prompt from 0: leave them out, {_OWN}")
    return mask


def _counts(positions: Tensor, counted: Tensor, mask: Tensor) -> bool:
    """Return True if ``positions``, of each prompt or of each completion, are ``counted`` wherever the mask is 1."""
    rows = len(positions) if positions.dim() == 2 else 0
    if not rows or positions.shape[1] != counted.shape[1] or len(counted) % rows:
        return False
    each = positions.repeat_interleave(len(counted) // rows, dim=0)
    return bool(((each == counted) | (mask == 0)).all())
