"""The families whose stored keys can be moved: the claims of their own rotary modules are proved, the
others are named.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, MAX_LEN

from lamina.models.convert import convert_model, layer_shapes
from lamina.models.errors import UnsupportedModelError
from lamina.models.key_rotation import find_rotary
from lamina.protocol.step_plan import LayerShape


def proved(name: str, frequencies: float = 1.0) -> list[LayerShape]:
    """``frequencies``: by which those that the model's modules tell are wrong."""
    model: Any = next(f for f in FAMILIES if f.name == name).build()
    program = convert_model(model, max_model_len=MAX_LEN)
    told = copy.deepcopy(model)
    for module_name, buffer in told.named_buffers():
        if module_name.endswith("inv_freq"):
            buffer.mul_(frequencies)
    return find_rotary(program, told, layer_shapes(program), torch.float32, MAX_LEN, torch.device("cpu"))


@pytest.mark.long(but=["ALiBi"])
@pytest.mark.parametrize(
    ("name", "turned", "interleaved"),
    [("gpt-neox", 4, False), ("glm4", 8, True), ("bloom", 0, False)],
    ids=["a part, halves", "a part, neighbours", "ALiBi"],
)
def test_how_keys_turn_is_found_and_proved(name: str, turned: int, *, interleaved: bool) -> None:
    for layer in proved(name):
        assert layer.rotary is not None
        assert 2 * len(np.frombuffer(layer.rotary.frequencies, "<f8")) == turned < layer.qk_dim
        assert layer.rotary.interleaved == interleaved


@pytest.mark.long
def test_learned_positions_are_refused_by_layer_and_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="--context-overflow truncate.*layer 0.*V depends on the position"):
        proved("gpt2")


@pytest.mark.long
def test_frequencies_that_are_a_little_off_are_no_proof() -> None:
    with pytest.raises(UnsupportedModelError, match="layer 0.*no rotation by the model's own frequencies"):
        proved("gpt-neox", 1.001)
