"""The layers with KV sparsity, and the tokens that they keep. No torch here, since the driver imports it."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.config.sparsity import SCORE_TOKENS, SparsityOptions

from .step_plan import LayerShape


def sparse_layers(layers: Sequence[LayerShape], windows: Sequence[int], options: SparsityOptions) -> list[bool]:
    """Return, by layer, whether blocks may be dropped. Attention sees kept blocks side by side, so layers in which
    distances count keep all: those with ALiBi or with a window, which keep little anyway. ``windows``: by layer, in
    tokens. Raises ValueError if no layer qualifies.
    """
    return _approximate(layers, windows, options) if options.drops_blocks else [False] * len(layers)


def selecting_layers(layers: Sequence[LayerShape], windows: Sequence[int], options: SparsityOptions) -> list[bool]:
    """Return, by layer, whether queries attend only some blocks. These are the same layers as in ``sparse_layers``,
    since attention sees selected blocks side by side, too. Raises ValueError if no layer qualifies.
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
    """Return the most tokens that a sequence has in each sparse layer, once blocks have been dropped."""
    return options.kv_budget + SCORE_TOKENS
