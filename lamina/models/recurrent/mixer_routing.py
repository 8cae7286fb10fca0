"""The routing of recurrent layers of a Hugging Face causal LM through operators, which become those of a cut.

Models call their kernels as functions of their module. While a model is captured, these functions are replaced. The
table FUNCTIONS has one for each kind of recurrence, by the names that transformers gives them in all families.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.models.errors import UnsupportedModelError
from lamina.ops.recurrence.op import CONVOLUTION_OP, RECURRENCE_OP
from lamina.ops.recurrence.spec import RecurrenceSpec

_SILU = ("silu", "swish")
_PACKING = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")  # of batches in one row; here a row is one token
_ANY_WIDTH = 2  # of the convolution before a recurrence, until both are one operator


class RoutedMixer(NamedTuple):
    """A call of a convolution or a recurrence in the last forward pass."""

    name: str  # dotted name of the module that called
    function: str


class MixerRouter:
    """Receives the convolutions and recurrences of every layer. ``calls`` has those of the last forward pass. While
    ``local`` is true, a function of each token alone replaces them, so that a pass can run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[RoutedMixer] = []
        self.local = False
        self._routed: list[Tensor] = []  # inputs of convolutions, and stand-ins of states, of the last forward pass
        self._names = {id(m): name for name, m in model.named_modules()}

    def begin(self, *_: Any) -> None:
        """Start a forward pass."""
        self.calls, self._routed = [], []

    def has_routed(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was a convolution's input, or the state after a recurrence, in the last pass."""
        return any(tensor is each for each in self._routed)

    @property
    def module_names(self) -> list[str]:
        """The modules with convolutions or recurrences, in order, each once."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def run(self, function: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Serve one call of a module's ``function``. Raises UnsupportedModelError."""
        caller = sys._getframe(2).f_locals.get("self")
        name = self._names.get(id(caller), type(caller).__name__)
        if packed := [key for key in _PACKING if kwargs.pop(key, None) is not None]:
            raise UnsupportedModelError(f"{name} passes {', '.join(packed)} to {function}, which cannot be expressed")
        self.calls.append(RoutedMixer(name, function))
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        extra = given.arguments.pop("kwargs", {})
        if unknown := [key for key in ("z", "state_dtype") if extra.get(key) is not None]:
            raise UnsupportedModelError(f"{name} passes {', '.join(unknown)} to {function}, which cannot be expressed")
        try:
            result, routed = FUNCTIONS[function](self.local, given.arguments)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{name} calls {function} in a way that cannot be expressed: {error}"
            ) from error
        self._routed.append(routed)
        return result


# A function returns what the model gets, and the tensor that the model would keep in its cache.
def _convolution(local: bool, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[B, C, T] -> [B, C, T]."""
    x, weight, bias, activation = (given[key] for key in ("hidden_states", "weight", "bias", "activation"))
    if activation is not None and activation not in _SILU:
        raise ValueError(f"activation {activation}")
    silu = activation is not None
    if not local:
        return CONVOLUTION_OP(x.squeeze(-1), weight, bias, silu).unsqueeze(-1), x
    y = x * weight[:, -1:] + (0.0 if bias is None else bias[:, None])
    return nn.functional.silu(y) if silu else y, x


def _delta(kind: str, local: bool, given: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Queries and keys [B, T, G, K], values [B, T, H, V] -> [B, T, H, V]."""
    q, k, v, g, beta = (given[key] for key in ("query", "key", "value", "g", "beta"))
    _starts_empty(given["initial_state"])
    state = torch.zeros((), device=v.device)
    if local:
        return (_local(v, q, k, g, beta), state), state
    heads, groups = v.shape[2], q.shape[2]
    spec = RecurrenceSpec(
        kind=kind,  # type: ignore[arg-type]
        heads=heads,
        width=_ANY_WIDTH,
        groups=groups,
        heads_per_group=heads // groups,
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        normalised=given["use_qk_l2norm_in_kernel"],
        scale=q.shape[3] ** -0.5,
    )
    y = RECURRENCE_OP([x.squeeze(1) for x in (q, k, v, g, beta)], [], spec.encode()).unsqueeze(1)
    return (y, state), state


def _scan(local: bool, given: dict[str, Any]) -> tuple[Any, Tensor]:
    """Inputs [B, T, H, V], B and C [B, T, G, K] -> [B, T, H, V], with a state if one is asked for."""
    x, dt, a, b, c = (given[key] for key in ("hidden_states", "dt", "A", "B", "C"))
    _starts_empty(given["initial_states"])
    least, most = given["dt_limit"]
    operands = {name: given[name] for name in ("D", "dt_bias") if given[name] is not None}
    heads, groups = x.shape[2], b.shape[2]
    if local:
        y = _local(x, dt, b, c)
    else:
        spec = RecurrenceSpec(
            kind="mamba2",
            heads=heads,
            width=_ANY_WIDTH,
            groups=groups,
            heads_per_group=heads // groups,
            key_dim=b.shape[3],
            value_dim=x.shape[3],
            softplus=bool(given["dt_softplus"]),
            dt_bias="dt_bias" in operands,
            skip="D" in operands,
            prompt_dt_least=float(least),
            prompt_dt_most=0.0 if most == float("inf") else float(most),
        )
        inputs = [t.squeeze(1) for t in (x, b, c, dt)]
        y = RECURRENCE_OP(inputs, [a, *operands.values()], spec.encode()).unsqueeze(1)
    state = torch.zeros((), device=x.device)
    return (y, state) if given["return_final_states"] else y, state


def _starts_empty(state: Tensor | None) -> None:
    if state is not None:
        raise ValueError("a state of its own to begin with")


def _local(values: Tensor, *others: Tensor) -> Tensor:
    """Replace a recurrence by a function of each token's own inputs [B, T, ...]: values [B, T, H, V] and others."""
    gate = torch.ones((), device=values.device)
    for x in others:
        gate = gate + torch.tanh(x.float().flatten(2).mean(-1))[..., None, None]
    return (values * gate).to(values.dtype)


# What a model calls -> a function of whether tokens are computed alone, and of the arguments by name.
FUNCTIONS: dict[str, Callable[[bool, dict[str, Any]], tuple[Any, Tensor]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": functools.partial(_delta, "gated_delta"),
    "chunk_kimi_delta_attention": functools.partial(_delta, "kimi_delta"),
    "mamba2_chunk_scan": _scan,
}


@contextlib.contextmanager
def routed_mixers(model: nn.Module) -> Iterator[MixerRouter]:
    """Route every convolution and recurrence of ``model`` through a MixerRouter while the block runs. Afterwards the
    modules of its code are as before.
    """
    router = MixerRouter(model)
    code = {sys.modules[type(m).__module__] for m in model.modules()}
    functions = [(module, name, vars(module)[name]) for module in code for name in FUNCTIONS if name in vars(module)]
    try:
        for module, name, original in functions:
            setattr(module, name, _replacement(router, name, original))
        with model.register_forward_pre_hook(router.begin):
            yield router
    finally:
        for module, name, original in functions:
            setattr(module, name, original)


def _replacement(router: MixerRouter, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return router.run(name, original, *args, **kwargs)

    return replacement
