"""Specs of recurrent layers: their text, their sizes, and sizes that are refused."""

from __future__ import annotations

import msgspec
import pytest
from recurrent import LARGE, SPECS

from lamina.ops.recurrence.spec import RecurrenceSpec


@pytest.mark.parametrize("name", SPECS)
def test_text(name: str) -> None:
    spec = SPECS[name]
    assert RecurrenceSpec.decode(spec.encode()) == spec
    with pytest.raises(msgspec.ValidationError):
        RecurrenceSpec.decode(spec.encode().replace('"width"', '"breadth"'))
    with pytest.raises(msgspec.ValidationError):
        RecurrenceSpec.decode(spec.encode().replace(spec.kind, "mamba1"))


def test_sizes_of_qwen3_next() -> None:
    """The published layer: 16 heads of keys, 32 of values, all of 128; its state has 2 MiB, and its history 96 KiB."""
    spec = RecurrenceSpec(
        kind="gated_delta", heads=32, groups=16, heads_per_group=2, key_dim=128, value_dim=128, width=4
    )
    assert spec.channels == 8192
    assert spec.channel_ranges == {"q": (0, 2048), "k": (2048, 2048), "v": (4096, 4096)}
    assert spec.input_columns == {"x": 8192, "g": 32, "beta": 32}
    assert spec.output_columns == 4096
    assert spec.static_shapes == {"weight": (8192, 4)}
    assert spec.state_bytes == 32 * 128 * 128 * 4 + 3 * 8192 * 4


def test_sizes_of_other_kinds() -> None:
    mamba = SPECS["nemotron_h"]
    assert mamba.channel_ranges == {"v": (0, 128), "k": (128, 64), "q": (192, 64)}
    assert mamba.static_shapes == {"weight": (256, 4), "bias": (256,), "A": (8,), "D": (8,), "dt_bias": (8,)}
    assert SPECS["kimi_linear"].input_columns == {"x": 288, "g": 96, "beta": 3}
    assert SPECS["lfm3"].channel_ranges == {"v": (0, 21)}
    assert SPECS["lfm3"].history_size == SPECS["lfm3"].state_size == 128  # 6 * 21, and room to align
    assert all(spec.state_size % 16 == spec.history_size % 16 == 0 for spec in {**SPECS, **LARGE}.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 0},
        {"groups": 2},
        {"heads_per_group": 4},
        {"first_head": 2},
        {"first_head": 1},  # then there are four groups
        {"key_dim": 0},
        {"value_dim": 0},
        {"width": 1},
        {"width": 9},
    ],
)
def test_sizes_that_do_not_fit(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes that do not fit together"):
        msgspec.structs.replace(SPECS["qwen3_next"], **wrong)


@pytest.mark.parametrize("wrong", [{"groups": 1}, {"value_dim": 2}, {"key_dim": 1}, {"heads_per_group": 2}])
def test_convolutions_without_heads(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes that do not fit together"):
        msgspec.structs.replace(SPECS["lfm2"], **wrong)


@pytest.mark.parametrize("wrong", [{"scale": float("nan")}, {"prompt_dt_least": -1.0}, {"prompt_dt_most": -1.0}])
def test_factors_that_are_no_numbers(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="factors that are no numbers to compute with"):
        msgspec.structs.replace(SPECS["nemotron_h"], **wrong)
