"""Rotary embeddings whose frequencies depend on the length of the text.

Such a module looks at the largest position of the batch. So the rows of a batch would not be independent, and stored K
would have been rotated with other frequencies than new K. Neither happens if no text is long enough to switch.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import UnsupportedModelError

_SWITCHING = ("longrope", "dynamic")


def freeze_frequencies(model: nn.Module, max_model_len: int) -> None:
    """Fix every rotary module of ``model`` to the frequencies of texts of up to ``max_model_len`` tokens. Raises
    UnsupportedModelError if the frequencies of such texts depend on their length.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds.startswith(_SWITCHING):
            _hold(name, module, "", _parameters(module, None), max_model_len)
            module.rope_type = "default"
        elif isinstance(kinds, dict) and any(k.startswith(_SWITCHING) for k in kinds.values()):
            for layer_type in [t for t, k in kinds.items() if k.startswith(_SWITCHING)]:
                _hold(name, module, f"{layer_type}_", _parameters(module, layer_type), max_model_len)
            module.rope_type = {t: "default" if k.startswith(_SWITCHING) else k for t, k in kinds.items()}


def _parameters(module: Any, layer_type: str | None) -> dict[str, Any]:
    parameters = module.config.rope_parameters
    return dict(parameters if layer_type is None else parameters[layer_type])


def _hold(name: str, module: Any, prefix: str, parameters: dict[str, Any], max_model_len: int) -> None:
    kind = parameters["rope_type"]
    longrope = kind.startswith("longrope")
    limit = int(parameters["original_max_position_embeddings"] if longrope else module.original_max_seq_len)
    if max_model_len > limit:
        raise UnsupportedModelError(
            f"{name}: its {kind} rotary embedding changes its frequencies for texts above {limit} tokens, "
            f"so rows of a batch depend on each other: set --max-model-len to {limit} or less"
        )
    # A longer text that this model saw before may have left its frequencies in the buffer.
    module._buffers[f"{prefix}inv_freq"] = getattr(module, f"{prefix}original_inv_freq")
