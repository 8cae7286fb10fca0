"""Refuses models whose tokens affect each other by other means than the attention that memory workers compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .attention_routing import AttentionRouter, DecodeStep, RoutedLayer
from .errors import UnsupportedModelError
from .model_files import one_line
from .recurrent.mixer_routing import MixerRouter
from .recurrent.requested_states import check_requested_states

_PROBE_TOKENS = 8
_PROBE_SEED = 20240501
_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_TOKENWISE_TYPES = ("mlp", "moe")  # layers of a model that has an attention in some layers only
_COUPLED = 1e-2  # differences of logits, relative to their spread, above which a model is refused
_COUNTED = 1e-5


def check_config(model: nn.Module) -> None:
    """Raise UnsupportedModelError for models that their class or configuration already rules out."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModelError(f"{name} has no config: a Hugging Face causal LM is needed")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder: only decoder-only models can be served")
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{name} has cross-attention: only decoder-only models can be served")
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise UnsupportedModelError(f"{name} has no language-model head: load it as AutoModelForCausalLM")
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise UnsupportedModelError(
            f"{name} is a quantised module ({method}): give the directory of its checkpoint, or a module whose weights "
            f"transformers has dequantised"
        )


def num_layers(model: nn.Module) -> int:
    """Return the number of decoder layers, one attention each, by the configuration. Raises UnsupportedModelError."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    # A decoder taken from an encoder-decoder counts its own layers separately.
    layers = getattr(text, "decoder_layers", None) or getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise UnsupportedModelError(f"the configuration of {type(model).__name__} has no num_hidden_layers")
    return layers


def check_layers(
    model: nn.Module, router: AttentionRouter, mixers: MixerRouter, max_model_len: int
) -> list[RoutedLayer]:
    """Run the routed model on a few tokens and return its attention layers.

    During the run, attention and recurrence of each token are limited to itself. Raises UnsupportedModelError if a
    layer has neither, unless the configuration says that it is an MLP. Raises it too if a token's result depends on
    more than the token and its position. Such cases are convolutions, recurrences, and positions counted inside. Models
    without weights (meta device) are only counted.
    """
    router.local = mixers.local = True
    try:
        with torch.no_grad():
            coupling, counting, numbering = _dependence(DecodeStep(model), max_model_len)
            layers, names = router.layers, mixers.module_names
        check_requested_states(model, mixers)
    except UnsupportedModelError:
        raise
    except Exception as error:  # any error of a model's own code when it runs without a cache
        where = f"{type(model).__name__}{_other_layers(model)}"
        raise UnsupportedModelError(f"{where} cannot run a step without a cache: {one_line(error)}") from error
    finally:
        router.local = mixers.local = False
    _check_count(model, layers, names)
    if coupling > _COUPLED:
        raise UnsupportedModelError(
            f"tokens of {type(model).__name__} depend on each other outside of attention (relative difference "
            f"{coupling:.1e}): a convolution, recurrence or position count keeps state that memory workers do not have"
        )
    if counting > _COUNTED:
        raise UnsupportedModelError(
            f"{type(model).__name__} counts positions by itself instead of by position_ids, and its result depends on "
            f"that within {max_model_len} tokens (relative difference {counting:.1e}): a lower --max-model-len may help"
        )
    if numbering > _COUNTED:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not number the tokens of a text 0, 1, 2, ... (relative difference "
            f"{numbering:.1e}): the positions that memory workers count by would not be its own"
        )
    return layers


def _dependence(step: DecodeStep, max_model_len: int) -> tuple[float, float, float]:
    """Return how much logits change, relative to their spread, in three ways that should make no difference. Meta: 0.

    First: a text runs as one row instead of token by token. This is the median over tokens, as a tie in an expert's
    routing may change one of them. Second: a step is moved far along in its text; the largest change over tokens.
    Third: the model numbers the tokens of the text itself; the largest change over tokens.
    """
    config: Any = step.model.config
    device = next(step.parameters()).device
    draw = torch.Generator().manual_seed(_PROBE_SEED)
    ids = torch.randint(config.get_text_config(decoder=True).vocab_size, (_PROBE_TOKENS, 1), generator=draw).to(device)
    positions = torch.arange(_PROBE_TOKENS, device=device)[:, None]
    as_text = step(ids.T, positions.T)[0].float()
    numbered = step(ids.T, None)[0].float()
    as_rows = step(ids, positions)[:, 0].float()
    with _FarAlong(max_model_len):
        far_along = step(ids, positions)[:, 0].float()
    if as_rows.is_meta:
        return 0.0, 0.0, 0.0
    coupling, counting = _relative(as_rows, as_text).median(), _relative(far_along, as_rows).max()
    return float(coupling), float(counting), float(_relative(numbered, as_text).max())


def _other_layers(model: nn.Module) -> str:
    """Return text that names the first layer that the configuration does not call an attention layer, if there is
    one.
    """
    known = (*_ATTENTION_TYPES, *_TOKENWISE_TYPES)
    unknown = next(((i, t) for i, t in enumerate(_layer_types(model)) if t not in known), None)
    return f" (layer {unknown[0]} is of type {unknown[1]})" if unknown else ""


def _layer_types(model: Any) -> list[str]:
    return getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []


class _FarAlong(TorchFunctionMode):
    """Makes a step's own count of its tokens, arange(1), say that the token is the last of a text of ``length``."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + (self._length - 1) if func is torch.arange and result.shape == (1,) else result


def _relative(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().amax(-1) / b.std(-1).clamp_min(1e-6)


def _check_count(model: nn.Module, layers: list[RoutedLayer], mixers: list[str]) -> None:
    expected = num_layers(model)
    if len(layers) == expected:
        return
    if mixers and not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has recurrent layers alone, and no softmax attention: it cannot be served"
        )
    routed = [*(layer.name for layer in layers), *mixers]
    blocks = _decoder_layers(model, expected)
    types = _layer_types(model) or [""] * len(blocks)
    without = [
        (index, name, block)
        for index, ((name, block), kind) in enumerate(zip(blocks, types, strict=False))
        if kind not in _TOKENWISE_TYPES and not any(f"{each}.".startswith(f"{name}.") for each in routed)
    ]
    if layers and not without and (mixers or len(layers) == sum(kind not in _TOKENWISE_TYPES for kind in types)):
        return
    for index, name, block in without:
        parts = ", ".join(f"{n} ({type(m).__name__})" for n, m in block.named_children())
        raise UnsupportedModelError(
            f"layer {index} ({name}, {type(block).__name__}) has no softmax attention or recurrence that can be routed "
            f"to memory workers; its parts: {parts}"
        )
    names = ", ".join(layer.name for layer in layers) or "none"
    raise UnsupportedModelError(
        f"{type(model).__name__} has {expected} layers but {len(layers)} attentions that can be routed ({names})"
    )


def _decoder_layers(model: nn.Module, count: int) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers by name: the first list of ``count`` modules."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{name}.{i}", m) for i, m in enumerate(module)]
    return []
