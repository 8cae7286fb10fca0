"""Families whose attention modules bypass transformers' attention interface: one small function for each.

A shim replaces one method of the attention module while the model is captured. It computes q, k, v like the original,
and passes them to ``attend`` (see AttentionRouter.attend). To add a family, add a function and a line in SHIMS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Attend = Callable[..., Tensor]  # AttentionRouter.attend: [R, Hq, T, D] x 3 -> [R, T, Hq, Dv]


class Shim(NamedTuple):
    """A replacement: ``function(attend, module, *args, **kwargs)`` for the module's method ``method``."""

    method: str
    function: Callable[..., Any]


def _gptj(attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    scale = 1.0 / float(module.scale_attn)
    return attend(module, query, key, value, mask=mask, scale=scale).transpose(1, 2), None


def _gpt_neo(attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    # The window of local layers is a buffer of the module, not part of the mask; scores are not scaled.
    window = module.config.window_size if module.attention_type == "local" else 0
    return attend(module, query, key, value, mask=mask, scale=1.0, own_window=window).transpose(1, 2), None


def _bloom(
    attend: Attend, module: Any, hidden: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden))
    slopes = alibi_slopes(module.num_heads)
    o = attend(module, query, key, value, mask=attention_mask, scale=module.inv_norm_factor, slopes=slopes)
    return module.dense(o.flatten(2)) + residual, None


def _mpt(
    attend: Attend, module: Any, hidden: Tensor, position_bias: Any, *, attention_mask: Any = None, **kwargs: Any
) -> Any:
    qkv = module.Wqkv(hidden)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = [x.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2)]
    slopes = mpt_slopes(module.n_heads)
    o = attend(module, *heads, mask=attention_mask, scale=float(module.softmax_scale), slopes=slopes)
    return module.out_proj(o.flatten(2)), None


def _falcon(
    attend: Attend,
    module: Any,
    hidden: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    *,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    qkv = module.query_key_value(hidden)
    if module.new_decoder_architecture:  # K and V with their own KV heads, not broadcast to all query heads
        group = module.num_heads // module.num_kv_heads
        qkv = qkv.unflatten(2, (module.num_kv_heads, group + 2, module.head_dim))
        query, key, value = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    else:
        query, key, value = module._split_heads(qkv)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    slopes = None
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:  # this family rounds its slopes to bfloat16 and scales them like the scores; its mask has them added
        slopes = alibi_slopes(module.num_heads).bfloat16().float() * module.inv_norm_factor
        attention_mask = None
    o = attend(module, query, key, value, mask=attention_mask, scale=module.inv_norm_factor, slopes=slopes)
    return module.dense(o.flatten(2)), None


def alibi_slopes(num_heads: int) -> Tensor:
    """Return [num_heads] fp32, the geometric series of ALiBi (arXiv 2108.12409 section 3). If the number of heads is no
    power of two, the rest are every other slope of the series twice as long.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def mpt_slopes(num_heads: int) -> Tensor:
    """Return [num_heads] fp32. MPT takes the next power of two and, of that series, the odd entries first. transformers
    builds them with the default ``alibi_bias_max`` of 8 whatever the configuration says.
    """
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    if whole != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return torch.tensor(slopes, dtype=torch.float32)


# Name of an attention class (subclasses included) -> its shim.
SHIMS = {
    "GPTJAttention": Shim("_attn", _gptj),
    "CodeGenAttention": Shim("_attn", _gptj),
    "GPTNeoSelfAttention": Shim("_attn", _gpt_neo),
    "BloomAttention": Shim("forward", _bloom),
    "MptAttention": Shim("forward", _mpt),
    "FalconAttention": Shim("forward", _falcon),
}


def shim_for(module: object) -> Shim | None:
    """Return the shim for a module's class or one of its bases; None if there is none. Where a release of transformers
    calls the attention interface instead, the method is gone.
    """
    shim = next((SHIMS[c.__name__] for c in type(module).__mro__ if c.__name__ in SHIMS), None)
    return shim if shim is not None and hasattr(module, shim.method) else None
