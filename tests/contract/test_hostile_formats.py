"""Stored formats whose headers and settings lie: each gives weights of the shape that it names, or a ModelError."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.models.checkpoint import StoredWeight, stored_tensors
from lamina.models.errors import ModelError
from lamina.models.quantization import INPUT_GROUPS, open_format

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/oracle.json"))
DTYPES = {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "BOOL": torch.bool,
}  # fmt: skip
LIES: list[Any] = [None, [], {}, "x", 0, -1, 1.5, [1, 2], {"a": 1}, 10**30, "4", 4.0]


def one_layer(name: str) -> tuple[dict[str, StoredWeight], dict[str, Any]]:
    stored = {k: w for k, w in stored_tensors(CHECKPOINTS / name).items() if "layers.1.mlp.up_proj" in k}
    settings: dict[str, Any] = json.loads((CHECKPOINTS / name / "config.json").read_text())["quantization_config"]
    return stored, settings


def answer(stored: Mapping[str, StoredWeight], settings: Any) -> str:
    """Unpack all weights. Returns the error; "" without one."""

    def read(name: str) -> Tensor:
        return torch.ones(stored[name].shape).to(DTYPES[stored[name].dtype])

    def header(name: str) -> Tensor:
        if name.endswith(INPUT_GROUPS):
            return read(name)
        return torch.empty(stored[name].shape, dtype=DTYPES[stored[name].dtype], device="meta")

    try:
        for weight in open_format("model", settings).find(stored):
            if weight.packed is not None:
                codes = weight.packed(header)
                assert tuple(codes.codes.shape) == tuple(weight.shape)
                assert codes.scales.shape == (weight.shape[0], weight.shape[1] // codes.group)
                codes.for_kernels()
            assert tuple(weight.values(read).shape) == tuple(weight.shape)
    except ModelError as error:
        return str(error)
    return ""


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_settings_that_lie(name: str) -> None:
    stored, settings = one_layer(name)
    refused = 0
    for path in places(settings):
        for lie in LIES:
            told = json.loads(json.dumps(settings))
            place = told
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = lie
            refused += bool(answer(stored, told))
    assert refused


@pytest.mark.parametrize("name", NAMES)
def test_headers_that_lie(name: str) -> None:
    stored, settings = one_layer(name)
    for part, weight in stored.items():
        shape = weight.shape
        shapes = {(), (0,), (1,), (1, 1), (2, 3, 4), (*shape, 0), (*shape, 1), (1, *shape), shape[:-1], shape[::-1]}
        for i, size in enumerate(shape):
            shapes |= {(*shape[:i], n, *shape[i + 1 :]) for n in (0, 1, size // 2, size + 1, 2 * size)}
        lies = [weight._replace(shape=s) for s in sorted(shapes)] + [weight._replace(dtype=d) for d in DTYPES]
        errors = [error for lie in lies if (error := answer({**stored, part: lie}, settings))]
        assert all(weight.name.rpartition(".")[0] in error and "\n" not in error for error in errors)
        assert errors or part.endswith(("weight_shape", "input_scale"))  # these are not read
        answer({other: w for other, w in stored.items() if other != part}, settings)
