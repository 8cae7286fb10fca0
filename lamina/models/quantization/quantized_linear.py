"""Linear layers of a model whose weights stay packed as their checkpoint has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.ops.collective.op import ALL_GATHER_OP
from lamina.ops.gemm.quantized import PackedForm
from lamina.ops.gemm.quantized_op import QUANTIZED_LINEAR_OP

from .quantized_embedding import QuantizedEmbedding
from .quantized_experts import ExpertWeights, packed_experts


class QuantizedLinear(nn.Module):
    """A torch.nn.Linear whose weight is packed. ``data`` [1, bytes] and ``form`` are as a backend has packed them."""

    data: Tensor
    order: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, data: Tensor, form: str, bias: nn.Parameter | None, order: Tensor | None = None, idle_inputs: int = 0
    ) -> None:
        """``order`` [in_features]: which of x's numbers each input of the packed weight is; None for the same.
        ``idle_inputs``: inputs after x for which the weight is zero. They get the largest magnitude of all ranks' rows,
        so that all round theirs to int8 by one scale.
        """
        super().__init__()
        known = PackedForm.decode(form)
        self.in_features, self.out_features, self.form = known.k_size - idle_inputs, known.cols, form
        self._idle_inputs = idle_inputs
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("order", order, persistent=False)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in_features] times the weight plus the bias: [..., out_features]."""
        y: Tensor = QUANTIZED_LINEAR_OP(self._ordered(x), self.data, self.bias, self.form)
        return y

    def product(self, x: Tensor, ranks: int) -> Tensor:
        """Return x times the weight, without the bias. Each of ``ranks`` has a part of a row."""
        x = self._ordered(x)
        if self._idle_inputs:
            most = ALL_GATHER_OP(x.abs().amax(-1, keepdim=True), ranks).amax(-1, keepdim=True)
            x = torch.cat([x, most.expand(*x.shape[:-1], self._idle_inputs)], -1)
        y: Tensor = QUANTIZED_LINEAR_OP(x, self.data, None, self.form)
        return y

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors on the meta device, in the shape of each packed weight, by the name that a plain one has."""
    matrices = QuantizedLinear | QuantizedEmbedding
    layers = {name: module for name, module in model.named_modules() if isinstance(module, matrices)}
    known = {name: PackedForm.decode(layer.form) for name, layer in layers.items()}
    sizes = {
        name: m.in_features if isinstance(m, QuantizedLinear) else known[name].k_size for name, m in layers.items()
    }
    linear = {f"{name}.weight": torch.empty(known[name].cols, k, device="meta") for name, k in sizes.items()}
    experts = packed_experts(model).items()
    return linear | {name: torch.empty(layer.plain_shape, device="meta") for name, layer in experts}


def packed_forms(model: nn.Module) -> dict[str, str]:
    """Return the form of each layer's packed weight, by the layer's name. Captures have it as a constant."""
    kinds = QuantizedLinear | QuantizedEmbedding | ExpertWeights
    return {name: module.form for name, module in model.named_modules() if isinstance(module, kinds)}
