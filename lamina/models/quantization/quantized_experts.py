"""Experts of a mixture whose weights stay packed: rows are grouped by expert, and each group is one product."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from lamina.ops.gemm.quantized import PackedForm
from lamina.ops.gemm.quantized_op import QUANTIZED_EXPERTS_OP

PREFIX = "packed_"  # of the names of ExpertWeights, before that of the weight in whose place they are


class ExpertWeights(nn.Module):
    """The packed weights of a layer of all experts. ``data`` [experts, bytes] and ``form`` are as a backend has packed
    them. ``is_transposed``: the plain weight is [experts, K, N].
    """

    data: Tensor
    orders: Tensor | None

    def __init__(self, data: Tensor, form: str, *, is_transposed: bool, orders: Tensor | None = None) -> None:
        """``orders`` [experts, K]: which of x's numbers each input of an expert's weight is; None for the same."""
        super().__init__()
        self.form, self.is_transposed = form, is_transposed
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("orders", orders, persistent=False)

    @property
    def plain_shape(self) -> tuple[int, int, int]:
        """The shape of the weight that is not packed."""
        known = PackedForm.decode(self.form)
        sizes = (known.k_size, known.cols) if self.is_transposed else (known.cols, known.k_size)
        return len(self.data), *sizes

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        """Return each row of x [rows, K] times the weight of expert ``ids`` [rows], plus its row of ``bias``."""
        x = x if self.orders is None else x.gather(-1, self.orders[ids])
        y: Tensor = QUANTIZED_EXPERTS_OP(x, self.data, ids, bias, self.form)
        return y


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has all experts of a layer, with the facts by which transformers computes them."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def weight_names(module: Any) -> tuple[str, str]:
    """Return the names of the two weights of experts, in the order in which they multiply."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def use_packed(module: Any, weights: dict[str, ExpertWeights]) -> None:
    """Have experts compute by packed weights, which are by name. Biases and activations stay theirs."""
    for name, packed in weights.items():
        del module._parameters[name]
        setattr(module, f"{PREFIX}{name}", packed)
    module.forward = MethodType(_forward, module)
    module._is_hf_initialized = True  # transformers would initialize plain weights


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' results, as transformers computes it."""
    count = top_k_index.shape[-1]
    ids = top_k_index.reshape(-1)
    y = hidden_states.repeat_interleave(count, 0)
    first, last = weight_names(self)
    y = getattr(self, f"{PREFIX}{first}")(y, ids, getattr(self, f"{first}_bias") if self.has_bias else None)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = getattr(self, f"{PREFIX}{last}")(y, ids, getattr(self, f"{last}_bias") if self.has_bias else None)
    if getattr(self, "has_post_expert_norm", False):
        y = self.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1, 1)
    summed: Tensor = y.view(-1, count, y.shape[-1]).sum(1)
    return summed.to(hidden_states.dtype)


def packed_experts(model: nn.Module) -> dict[str, ExpertWeights]:
    """Return packed weights of experts by the names that plain ones have."""
    found_modules = {name: module for name, module in model.named_modules() if isinstance(module, ExpertWeights)}
    return {name.replace(f".{PREFIX}", "."): module for name, module in found_modules.items()}
