"""Which layers keep or attend some of a sequence's KV only, and how much. No torch here: the driver needs it too."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.config.sparsity import SCORE_TOKENS, SparsityOptions

from .step_plan import LayerShape


def sparse_layers(layers: Sequence[LayerShape], windows: Sequence[int], options: SparsityOptions) -> list[bool]:
    """By layer. Blocks that are dropped close ranks, so a layer in which distances count keeps all: one with a window,
    which keeps little anyway, or with ALiBi. ``windows``: by layer, in tokens. Raises ValueError where none is left.
    """
    return _approximate(layers, windows, options) if options.drops_blocks else [False] * len(layers)


def selecting_layers(layers: Sequence[LayerShape], windows: Sequence[int], options: SparsityOptions) -> list[bool]:
    """By layer, whether queries attend some blocks only. What is chosen lies side by side, so it is the same layers as
    above. Raises ValueError where none is left.
    """
    return _approximate(layers, windows, options) if options.selects_blocks else [False] * len(layers)


def _approximate(layers: Sequence[LayerShape], windows: Sequence[int], options: SparsityOptions) -> list[bool]:
    name = f"--kv-sparsity {options.kv_sparsity}"
    free = [not window and not layer.slopes for layer, window in zip(layers, windows, strict=True)]
    sparse = [number >= options.kv_full_layers and each for number, each in enumerate(free)]
    if any(sparse):
        return sparse
    if not any(free):
        raise ValueError(f"{name}: all layers of this model have a window or ALiBi: leave it out")
    most = max(number for number, each in enumerate(free) if each)
    raise ValueError(
        f"--kv-sparsity {options.kv_sparsity}:full-layers={options.kv_full_layers} leaves none of {len(layers)} "
        "layers sparse: "
        f"use {most} or fewer"
    )


def max_kept_tokens(options: SparsityOptions) -> int:
    """Tokens that a sequence has at most in each sparse layer, once blocks were dropped for the first time."""
    return options.kv_budget + SCORE_TOKENS
