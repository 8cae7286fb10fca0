"""The routing of all attentions of a Hugging Face causal LM through the operator at which the converter cuts."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.ops.attention.op import ATTENTION_OP
from lamina.ops.attention.spec import AttentionSpec

from .attention_masks import MaskRule, WholeMask, sliding_window_of
from .errors import UnsupportedModelError
from .rotary_embedding import freeze_frequencies
from .shims import shim_for

# Keywords of transformers' attention interface that do not change the computation here. Any other keyword that says
# something must be one that AttentionSpec expresses.
_HARMLESS = frozenset(
    {
        "position_ids",  # K arrives rotated
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "training",
        "deterministic",  # an option of flash attention
        "use_top_left_mask",
        "target_dtype",
    }
)
# Layouts of packed batches; here a row always has one token.
_PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


class WeightShard(NamedTuple):
    """A part of a model's weights. ``heads``: query and KV heads of each attention, of all ranks together. ``padded``:
    attentions whose output has zeros in the places of other ranks' heads, as its inputs have.
    """

    rank: int = 0
    size: int = 1
    heads: tuple[tuple[int, int], ...] = ()
    padded: tuple[bool, ...] = ()

    def own_heads(self, x: Tensor, whole: int, dim: int) -> Tensor:
        """Return this part's heads of ``x`` along ``dim``. ``x`` has the heads of the ``whole`` model, or only
        these.
        """
        each = whole // self.size
        return x.narrow(dim, self.rank * each, each) if self.size > 1 and x.shape[dim] == whole else x

    def output(self, layer: int, o: Tensor) -> Tensor:
        """Return the output of an attention [R, T, Hq, Dv] as what follows it expects."""
        if layer >= len(self.padded) or not self.padded[layer]:
            return o
        before, own = self.rank * o.shape[2], o.shape[2]
        return nn.functional.pad(o, (0, 0, before, self.heads[layer][0] - before - own))


WHOLE_MODEL = WeightShard()


@dataclass(frozen=True)
class RoutedLayer:
    """An attention that a forward pass went through."""

    name: str  # dotted name of the attention module
    module: nn.Module
    spec: AttentionSpec
    heads: tuple[int, int]  # heads of Q; heads of K and V


class AttentionRouter:
    """Receives the attention of every layer, in order, and describes it as an AttentionSpec. ``layers`` has the layers
    of the last forward pass. While ``local`` is true, a function of each token alone replaces attention, so that a pass
    can run. Otherwise the operator is called, which can only be traced.
    """

    def __init__(self, model: nn.Module, max_model_len: int, part: WeightShard = WHOLE_MODEL) -> None:
        self.layers: list[RoutedLayer] = []
        self.local = False
        self._part = part
        self._max_model_len = max_model_len
        self._names: dict[int, str] = {id(m): name for name, m in model.named_modules()}
        self._masks: list[tuple[Tensor, int | None]] = []  # a mask of this pass, and its window

    def begin(self, *_: Any) -> None:
        """Start a forward pass."""
        self.layers, self._masks = [], []

    def mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: MaskRule,
        device: Any = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        **_: Any,
    ) -> Tensor:
        """Record the meaning of a mask, as transformers' mask interface, and return one without information."""
        window = sliding_window_of(mask_function, self._max_model_len)
        if window is None and allow_is_causal_skip and (local_size or 0) >= self._max_model_len:
            window = 0  # a rule over padding that cannot be read while tracing, but is causal up to local_size
        mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
        if self.local:  # while tracing, a text has one token, of which no model takes a part
            mask = mask.as_subclass(WholeMask)
        self._masks.append((mask, window))
        return mask

    def interface(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Serve transformers' attention interface: q [R, Hq, T, D], k, v [R, Hkv, T, ..] -> [R, T, Hq, Dv]."""
        unknown = [k for k, v in others.items() if _says_something(v) and k not in _HARMLESS and k not in _PACKING]
        if unknown:
            raise self._refused(module, f"passes {', '.join(unknown)} to its attention, which cannot be expressed")
        if dropout:
            raise self._refused(module, f"drops out attention weights (dropout={dropout}): call model.eval() first")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if is_causal is False:
            raise self._refused(module, "is not causal (is_causal=False): a token would attend to later ones")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        o = self.attend(
            module,
            query,
            key,
            value,
            mask=attention_mask,
            scale=scale,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return o, None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float,
        window: int | None = None,
        own_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Route one attention: [R, Hq, T, D], [R, Hkv, T, D], [R, Hkv, T, Dv] -> [R, T, Hq, Dv]. ``window``: stated by
        the layer in addition to its mask, for kernels without masks; it must agree with the mask. ``own_window``:
        applied by the layer itself, in addition to its mask. Raises UnsupportedModelError.
        """
        if not isinstance(scale, int | float):
            raise self._refused(module, "scales its scores by a tensor, which cannot be expressed")
        if key.shape[2] != query.shape[2]:
            raise self._refused(module, f"attends to {key.shape[2]} keys for {query.shape[2]} tokens without a cache")
        query, key = query.to(value.dtype), key.to(value.dtype)  # some models rotate in fp32; messages have one dtype
        spec = AttentionSpec(
            scale=float(scale),
            window=self._window(module, mask, window, own_window),
            softcap=float(softcap or 0.0),
            sinks=sinks is not None,
            alibi=slopes is not None,
        )
        layer = len(self.layers)
        if layer < len(self._part.heads):
            q_heads, kv_heads = self._part.heads[layer]
            own, query = self._part.own_heads, self._part.own_heads(query, q_heads, 1)
            key, value = own(key, kv_heads, 1), own(value, kv_heads, 1)
            sinks, slopes = (x if x is None else own(x, q_heads, 0) for x in (sinks, slopes))
        self.layers.append(RoutedLayer(self._name(module), module, spec, (query.shape[1], key.shape[1])))
        if self.local:
            return self._part.output(layer, _local(query, key, value))
        if slopes is not None:
            slopes = slopes.to(query.device)
        return self._part.output(layer, ATTENTION_OP(query, key, value, layer, spec.encode(), sinks, slopes))

    def _window(self, module: nn.Module, mask: Tensor | None, stated: int | None, own: int | None) -> int:
        """Return the window that counts: the mask's, which transformers' default attention applies."""
        known = {w for m, w in self._masks if mask is None or m is mask}
        if mask is not None and not known:
            raise self._refused(module, "alters its mask in a way that cannot be expressed")
        if None in known:
            raise self._refused(
                module, f"has a mask that is not causal with one window within {self._max_model_len} tokens"
            )
        windows = [w for w in known if w is not None]
        if len(windows) > 1:
            raise self._refused(module, f"has no mask: unclear which of the windows {sorted(windows)} it means")
        stated = 0 if stated is None or not 0 < stated < self._max_model_len else int(stated)
        window = windows[0] if windows else stated
        if stated and stated != window:
            raise self._refused(module, f"states a window of {stated} tokens but its mask means {window or 'all'}")
        if own is not None and 0 < own < self._max_model_len:
            window = min(window or own, own)
        return window

    def _name(self, module: nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)

    def _refused(self, module: nn.Module, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"layer {len(self.layers)} ({self._name(module)}) {reason}")


@contextlib.contextmanager
def routed_attention(
    model: nn.Module, *, max_model_len: int, experts: str = "grouped_mm", part: WeightShard = WHOLE_MODEL
) -> Iterator[AttentionRouter]:
    """Route every attention of ``model`` through an AttentionRouter while the block runs, so that it can be traced.

    ``max_model_len``: tokens; what only matters to longer texts is left out. ``experts``: transformers' name of the way
    to compute experts; its default loops over them, depending on data. ``part``: the heads that the model's attention
    will have. Afterwards, even after an exception, the model, its configuration and transformers' registries are as
    before. Raises UnsupportedModelError.
    """
    router = AttentionRouter(model, max_model_len, part)
    name = f"lamina_{id(router):x}"
    with _registered(name, router), _unchanged(model), model.register_forward_pre_hook(router.begin):
        for module in model.modules():
            module.training = False
            if (shim := shim_for(module)) is not None:
                setattr(module, shim.method, functools.partial(shim.function, router.attend, module))
        for config in _configs(model):
            config._attn_implementation = name
            config._experts_implementation = experts
            config.use_cache = False  # for models whose own forward does not take it
            if getattr(config, "use_bidirectional_attention", None) == "vision":
                config.use_bidirectional_attention = None  # no token of a text is of an image
        freeze_frequencies(model, max_model_len)
        yield router


class DecodeStep(nn.Module):
    """``(input_ids [R, 1], position_ids [R, 1]) -> logits [R, 1, V]``: R tokens of R texts, or of one, without a cache.
    It passes the arguments that the model's own forward accepts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._accepts = inspect.signature(model.forward).parameters
        if "input_ids" not in self._accepts:
            raise UnsupportedModelError(f"{type(model).__name__}.forward takes no input_ids: not a causal LM")

    def forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """Run a step. Both arguments are int64; rows see each other only through attention. ``position_ids``: None if
        the model numbers its tokens itself.
        """
        # Without a mask of ones, transformers looks for texts packed into one row, and makes masks from data. It reads
        # the mask, so that of a model without weights is not on the meta device.
        arguments: dict[str, Any] = {
            "position_ids": position_ids,
            "attention_mask": torch.ones_like(input_ids, device="cpu" if input_ids.is_meta else None),
            "use_cache": False,
            "return_dict": True,
        }
        output = self.model(
            input_ids=input_ids, **{k: v for k, v in arguments.items() if k in self._accepts and v is not None}
        )
        logits: Tensor = output.logits
        return logits


def _says_something(value: Any) -> bool:
    """Return whether an argument may change a computation: not None, False, a count of 0, or an empty container."""
    return bool(value) if isinstance(value, int | str | Sized) and not isinstance(value, Tensor) else value is not None


def _local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Replace attention by a function of each token's own q, k and v, which also depends on the rotation of q and k."""
    group = query.shape[1] // value.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    gate = 1.0 + torch.tanh(query.mean(-1, keepdim=True)) + torch.tanh(key.mean(-1, keepdim=True))
    return (gate * value).transpose(1, 2).contiguous()


def _configs(model: nn.Module) -> list[Any]:
    """Return all configuration objects in the model, each once."""
    configs: dict[int, Any] = {}
    todo = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    while todo:
        config = todo.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
            todo += [v for k in config.sub_configs if (v := getattr(config, k, None)) is not None]
    return list(configs.values())


@contextlib.contextmanager
def _registered(name: str, router: AttentionRouter) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTIONS

    # Models may have their own interfaces, which share these class-wide mappings.
    MASKS.register(name, router.mask)
    ATTENTIONS.register(name, router.interface)
    try:
        yield
    finally:
        del MASKS._global_mapping[name]
        del ATTENTIONS._global_mapping[name]


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of the model's modules and configurations: the same objects, not their contents."""
    tables = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    owners: list[Any] = [*model.modules(), *_configs(model)]
    saved = [(o, dict(vars(o)), {t: vars(o)[t].copy() for t in tables if t in vars(o)}) for o in owners]
    try:
        yield
    finally:
        for owner, attributes, contents in saved:
            vars(owner).clear()
            vars(owner).update(attributes)
            for table, content in contents.items():
                attributes[table].clear()
                attributes[table].update(content)
