"""The states that a model asks of its cache, of which those that were not routed rule it out.

What a model computes does not show them. With small weights a recurrent layer hardly changes any logit. A step without
a cache lacks a window that the cache keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.models.cache_name import cache_argument
from lamina.models.errors import UnsupportedModelError
from lamina.models.model_files import one_line

from .mixer_routing import FUNCTIONS, MixerRouter

_TOKENS = 4


def check_requested_states(model: nn.Module, mixers: MixerRouter) -> None:
    """Run the routed model on a few tokens with a cache that records what it keeps. Raises UnsupportedModelError, with
    the layer, for a state that is none of a routed layer, and for a class of cache that comes with the model. A model
    that takes no such cache is not judged.
    """
    from transformers import DynamicCache

    cache = _recording_cache(model)
    for number, layer in enumerate(cache.layers):
        if type(layer).__module__ != DynamicCache.__module__:
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} keeps K and V in a cache of its own "
                f"({type(layer).__name__}), which decides what it attends to"
            )
    device = next(model.parameters()).device
    ids = torch.ones(1, _TOKENS, dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, return_dict=True, **{cache_argument(model): cache})
    except Exception as error:  # any error of a model's own code, when it gets a cache that it may not know
        if mixers.calls or cache.requests:
            raise UnsupportedModelError(f"{type(model).__name__} cannot run with a cache: {one_line(error)}") from error
    for layer, kind, tensor in cache.requests:
        if not mixers.has_routed(tensor):
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} keeps {kind} in its cache, and no function computes it that "
                f"can be routed to memory workers: these are {', '.join(FUNCTIONS)}"
            )


def _recording_cache(model: Any) -> Any:
    from transformers import DynamicCache

    class RecordingCache(DynamicCache):  # type: ignore[misc]
        """Keeps K and V, and records all other states that layers hand over."""

        def __init__(self) -> None:
            super().__init__(config=model.config.get_text_config(decoder=True))
            self.requests: list[tuple[int, str, Tensor]] = []  # layer, what it keeps, the tensor

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
            return None

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
            return None

        def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
            self.requests.append((layer_idx, "inputs of a convolution", conv_states))
            return conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
            self.requests.append((layer_idx, "a recurrent state", recurrent_states))
            return recurrent_states

        def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
            self.requests.append((layer_idx, "an index of its keys", indexer_key_states))
            return indexer_key_states

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return False

    return RecordingCache()
