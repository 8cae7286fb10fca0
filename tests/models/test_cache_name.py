"""The KV cache is passed by the name that a model's forward has, whatever the installed transformers calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache, LlamaConfig

from lamina.models.cache_name import cache_argument, cache_name
from lamina.models.recurrent.requested_states import check_requested_states


class Model(nn.Module):
    """Keeps the cache that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        self.weight = nn.Parameter(torch.zeros(1))
        self.given: Any = None


class Older(Model):
    def forward(self, input_ids: Any, past_key_values: Any = None, **more: Any) -> None:
        self.given = past_key_values


class Newer(Model):
    def forward(self, input_ids: Any, cache: Any = None, **more: Any) -> None:
        self.given = cache


@pytest.mark.parametrize(("model", "name"), [(Older, "past_key_values"), (Newer, "cache")])
def test_a_forward_gets_the_cache_by_its_own_name(model: type[Model], name: str) -> None:
    made, mixers = model(), SimpleNamespace(calls=[], has_routed=bool)
    check_requested_states(made, mixers)  # type: ignore[arg-type]
    assert isinstance(made.given, Cache)
    assert cache_argument(made) == name


def test_a_forward_without_such_a_name_gets_it_by_that_of_transformers() -> None:
    assert cache_argument(SimpleNamespace(forward=lambda **more: None)) == cache_name()
