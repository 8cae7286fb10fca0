"""The tensors that live in a slice, against counts by hand and against what torch allocates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import LlamaConfig

from lamina.models.activation_memory import peak_activation_bytes
from lamina.models.convert import convert_model
from lamina.models.load import from_config

ROWS, WIDTH = 7, 5
ONE = ROWS * WIDTH * 4  # bytes of a tensor of that shape


class _Toy(nn.Module):
    """Two tensors at once in addition to the input, then a view, then a wide one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, device="meta"))

    def forward(self, x: Tensor, o: Tensor, send: Any) -> tuple[Tensor]:
        a = x * self.weight
        b = a + 1
        c = b.view(WIDTH, ROWS)
        return (torch.cat([c, c, c]),)


def program(module: nn.Module) -> Any:
    row = SimpleNamespace(shape=(WIDTH,), dtype=torch.float32)
    pieces = [SimpleNamespace(module=fx.symbolic_trace(module), signature=str(i), index=i) for i in (1,)]
    return SimpleNamespace(
        slices=pieces, cuts=[SimpleNamespace(tensors=[row])] * 2, calls=[SimpleNamespace(out=row)] * 2
    )


def test_values_live_until_their_last_use_and_views_cost_nothing() -> None:
    given = 2 * ONE
    assert peak_activation_bytes(program(_Toy()), rows=ROWS, sampled=1) == given + ONE + 3 * ONE, (
        "b, and what is made of it"
    )


@pytest.mark.long
@pytest.mark.parametrize("rows", [64, 200])
def test_a_model_takes_what_torch_allocates(rows: int) -> None:
    """The slice in the middle is run on weights."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    plan = convert_model(from_config(config), max_model_len=64)
    real = convert_model(from_config(config, device="cpu"), max_model_len=64)
    given = [torch.zeros(rows, *t.shape, dtype=t.dtype) for t in (*real.cuts[0].tensors, real.calls[0].out)]
    middle = SimpleNamespace(slices=plan.slices[1:2], cuts=plan.cuts, calls=plan.calls)
    found = peak_activation_bytes(middle, rows=rows, sampled=1) - sum(x.nbytes for x in given)  # type: ignore[arg-type]
    send: Any = SimpleNamespace(q=lambda *_: None, kv=lambda *_: None)
    real.slices[1](*given, send)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = real.slices[1](*given, send)
    assert held
    live = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    assert most > 4 * rows * 160
    assert found == pytest.approx(most, rel=0.1)
