"""A convolution and the recurrence that reads it become one operator, unless anything is computed between the two.

Covers: lamina/models/recurrent/requested_states.py, lamina/protocol/mixers.py, lamina/ops/recurrence/op.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from model_table.tiny_models import build
from msgspec import structs
from support.models.hybrids import build_hybrid
from torch import Tensor, nn

from lamina.models.convert import convert_model, recurrent_layers
from lamina.models.errors import UnsupportedModelError
from lamina.models.recurrent.mixer_folding import fold_mixers
from lamina.ops.recurrence.op import CONVOLUTION_OP, MIXER_OP, RECURRENCE_OP
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.mixers import Exchange

SPEC = RecurrenceSpec(kind="gated_delta", heads=4, width=2, groups=2, heads_per_group=2, key_dim=3, value_dim=5)
CHANNELS = 2 * 6 + 20


class Layer(nn.Module):
    """A recurrent layer whose convolution is read by ``between``."""

    def __init__(
        self,
        between: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
        parts: int = 1,
        spec: RecurrenceSpec = SPEC,
    ) -> None:
        super().__init__()
        self.between, self.parts, self.spec = between, parts, spec
        self.weight = nn.Parameter(torch.zeros(CHANNELS, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.parts == 1:
            q, k, v = self.between(CONVOLUTION_OP(x, self.weight, None, True))
        else:
            sizes = (6, 6, 20)
            pieces = zip(x.split(sizes, 1), self.weight.split(sizes), strict=True)
            q, k, v = (CONVOLUTION_OP(part, weight, None, True) for part, weight in pieces)
            q, k, v = q.view(-1, 2, 3), k.view(-1, 2, 3), v.view(-1, 4, 5)
        out: Tensor = RECURRENCE_OP([q, k, v, x[:, :4], x[:, 4:8]], [], self.spec.encode())
        return out


def plain(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = y.unsqueeze(1).transpose(1, 2).squeeze(2).split((6, 6, 20), 1)
    return q.reshape(-1, 2, 3), k.reshape(-1, 2, 3), v.reshape(-1, 4, 5)


def swapped(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = plain(y)
    return k, q, v


def repeated(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = plain(y)
    return q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), v


def tiled(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = plain(y)
    q, k = (each.unsqueeze(1).expand(-1, 2, -1, -1).reshape(-1, 4, 3) for each in (q, k))
    return q, k, v


def scaled(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = plain(y)
    return q, k * 2.0, v


def folded(layer: Layer) -> Any:
    rows = torch.export.Dim("R", min=1, max=64)
    program = torch.export.export(layer, (torch.zeros(3, CHANNELS),), dynamic_shapes=({0: rows},), strict=False)
    fold_mixers(program.graph)
    return program.graph


@pytest.mark.parametrize("parts", [1, 3])
def test_both_become_one_operator_with_the_facts_of_both(parts: int) -> None:
    graph = folded(Layer(plain, parts))
    (mixer,) = (node for node in graph.nodes if node.target is MIXER_OP)
    inputs, operands, number, text = mixer.args
    spec = RecurrenceSpec.decode(text)
    assert (spec.width, spec.silu, spec.bias, spec.channels, number) == (4, True, False, CHANNELS, 0)
    assert [tuple(x.meta["val"].shape[1:]) for x in inputs] == [(CHANNELS,), (4,), (4,)]
    assert tuple(operands[0].meta["val"].shape) == (CHANNELS, 4)
    assert not any(node.target in (CONVOLUTION_OP, RECURRENCE_OP) for node in graph.nodes)


def test_heads_share_the_queries_and_keys_that_a_model_repeats_for_them() -> None:
    """Qwen3.5 repeats them before its recurrence up to transformers 5.22."""
    apart = structs.replace(SPEC, groups=4, heads_per_group=1)
    graph = folded(Layer(repeated, spec=apart))
    (mixer,) = (node for node in graph.nodes if node.target is MIXER_OP)
    assert RecurrenceSpec.decode(mixer.args[3]) == structs.replace(SPEC, width=4)
    with pytest.raises(UnsupportedModelError, match="reads the channels of its convolution in another order"):
        folded(Layer(tiled, spec=apart))


def test_another_order_of_channels_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="reads the channels of its convolution in another order"):
        folded(Layer(swapped))


def test_arithmetic_between_the_two_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="computes mul between its convolution and its recurrence"):
        folded(Layer(scaled))


def test_attention_and_recurrence_of_a_layer_are_one_exchange() -> None:
    program = convert_model(build_hybrid("falcon_h1"), max_model_len=64)
    assert recurrent_layers(program).exchanges == [Exchange(0, 0), Exchange(1, 1)]
    assert [cut.index for cut in program.cuts] == [0, 1]


@pytest.mark.long
def test_a_model_that_rotates_all_of_q_carries_a_part_without_columns() -> None:
    """Rows of it agree."""
    assert len(convert_model(build("qwen3_5_text"), max_model_len=64).mixers) > 0


def test_a_state_that_no_routed_function_computes_is_refused_by_what_the_model_asks() -> None:
    """Mamba-1 computes its scan by other functions; with the usual tiny weights it hardly changes a logit."""
    config = transformers.JambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=2, mamba_d_state=4, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = transformers.JambaForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="layer 0 of JambaForCausalLM keeps a recurrent state in its cache"):
        convert_model(model, max_model_len=64)
