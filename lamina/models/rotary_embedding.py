"""Rotary embeddings whose frequencies depend on the length of the text.

Such a module looks at the largest position of the batch. So the rows of a batch would not be independent, and stored K
would have been rotated with other frequencies than new K. Neither happens if one length decides for all texts: the
longest one that is served.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_SWITCHING = ("longrope", "dynamic")


def freeze_frequencies(model: nn.Module, max_model_len: int) -> None:
    """Fix every rotary module of ``model`` to the frequencies of a text of ``max_model_len`` tokens."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds.startswith(_SWITCHING):
            _hold(module, "", _parameters(module, None), max_model_len)
            module.rope_type = "default"
        elif isinstance(kinds, dict) and any(k.startswith(_SWITCHING) for k in kinds.values()):
            for layer_type in [t for t, k in kinds.items() if k.startswith(_SWITCHING)]:
                _hold(module, f"{layer_type}_", _parameters(module, layer_type), max_model_len)
            module.rope_type = {t: "default" if k.startswith(_SWITCHING) else k for t, k in kinds.items()}


def _parameters(module: Any, layer_type: str | None) -> dict[str, Any]:
    parameters = module.config.rope_parameters
    return dict(parameters if layer_type is None else parameters[layer_type])


def _hold(module: Any, prefix: str, parameters: dict[str, Any], max_model_len: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = parameters["rope_type"]
    longrope = kind.startswith("longrope")
    limit = int(parameters["original_max_position_embeddings"] if longrope else module.original_max_seq_len)
    # A longer text that this model saw before may have left its frequencies in the buffer.
    frequencies = getattr(module, f"{prefix}original_inv_freq")
    if max_model_len > limit:
        length = limit + 1 if longrope else max_model_len
        more = {"layer_type": prefix[:-1]} if prefix else {}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, frequencies.device, seq_len=length, **more)
    module._buffers[f"{prefix}inv_freq"] = frequencies
