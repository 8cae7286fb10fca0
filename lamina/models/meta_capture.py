"""A cut model without its weights: the work of a step as it is served, for calculations that need no device."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lamina.converter import ConversionError, SlicedProgram
from lamina.converter.stamp import layer_stack, stamp
from lamina.kv.stored_format import head_bytes
from lamina.ops.attention.spec import AttentionSpec
from lamina.ops.gemm import LinearBackend

from .checkpoint import check_quantization, find_checkpoint, is_quantized, read_config, weight_files
from .convert import convert_model
from .errors import UnsupportedModelError
from .load import from_config, max_model_len
from .quantization.gguf_file import is_gguf
from .quantization.pack_weights import replace_layers
from .quantization.round_to_nearest import BY_NAME
from .read_shard import WHOLE
from .tensor_parallel_shard import ShardPlan, plan_shard
from .unsupported_models import num_layers


class CutPlan(NamedTuple):
    """A model without weights, cut. ``shard``: of the rank whose part it is, if there are several."""

    model: nn.Module
    program: SlicedProgram
    shard: ShardPlan | None


def plan_cuts(
    model: str,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    ranks: int = 1,
    early_q: bool = True,
    hf_overrides: str = "",
    backend: LinearBackend | None = None,
    quantization: str = "",
    quantization_compute: str = "auto",
) -> CutPlan:
    """Cut a model without weights. ``model``: a directory, a hub id or a configuration file. ``ranks``: with several,
    the result is the part of the first one. ``early_q``: as in ``converter.convert``. ``backend``: linear layers of a
    quantised checkpoint stay packed, as in ``load``, where its files are here, and so do those of others with a
    ``quantization`` of int8 or int4. ``quantization_compute``: as in ``load``. If
    provably the same, a few layers are captured and the others derived from them; else all are captured.
    """
    config = configuration(model, trust_remote_code=trust_remote_code, hf_overrides=hf_overrides)
    limit, keep = max_model_len(config), not trust_remote_code
    asked = quantization, quantization_compute
    packed_from = _packed_files(model, trust_remote_code, *asked) if backend is not None else None

    def pack(made: nn.Module, shard: ShardPlan) -> nn.Module:
        if packed_from is not None and backend is not None:
            replace_layers(made, packed_from, shard, backend, BY_NAME.get(quantization), quantization_compute)
        return made

    module = from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if ranks > 1:
        shard = plan_shard(module, 0, ranks, limit)
        shard.shrink_to_shard(module)
        pack(module, shard)
        shard.attach_collectives(module)
        program = convert_model(module, max_model_len=limit, part=shard.weight_shard, early_q=early_q, keep=keep)
        return CutPlan(module, program, shard)

    def shallow(few: int) -> tuple[SlicedProgram, Sequence[nn.Module], Sequence[Hashable]]:
        less = _with_layers(config, num_layers(module), few)
        small = pack(from_config(less, dtype=dtype, trust_remote_code=trust_remote_code), WHOLE)
        program = convert_model(small, max_model_len=limit, early_q=early_q, keep=keep)
        return program, layer_stack(small, few)[1], _layer_entries(less, few)

    pack(module, WHOLE)
    total, stamped = num_layers(module), None
    with suppress(ConversionError):  # not in a list of layers: all of them are captured
        name, layers = layer_stack(module, total)
        stamped = stamp(shallow, layers, _layer_entries(config, total), f"model.{name}")
    whole = stamped or convert_model(module, max_model_len=limit, early_q=early_q, keep=keep)
    return CutPlan(module, whole, None)


def _packed_files(model: str, trust_remote_code: bool, quantization: str, compute: str) -> Path | None:
    """Return the directory or file of a checkpoint whose weights are here, and packed in memory; None for others.
    Raises ModelError for a ``quantization``, or a ``compute``, that does not suit it.
    """
    path = Path(model).expanduser()
    if path.is_file() and not is_gguf(path):
        return None
    directory = find_checkpoint(model, trust_remote_code=trust_remote_code, weights=False)
    check_quantization(directory, quantization, compute)
    files = weight_files(directory) if is_quantized(directory) or quantization in BY_NAME else []
    return directory if files and all(file.is_file() for file in files) else None


def check_plannable(program: SlicedProgram) -> None:
    """Raise UnsupportedModelError for a model whose states no plan counts yet."""
    if program.mixers:
        raise UnsupportedModelError(
            f"plans do not count recurrent states yet, and {program.mixers[0].name} has one: start the model instead"
        )


def configuration(model: str, *, trust_remote_code: bool = False, hf_overrides: str = "") -> Any:
    """Return the configuration of a directory, a hub id or a configuration file."""
    path = Path(model).expanduser()
    if not path.is_file() or is_gguf(path):
        directory = find_checkpoint(model, trust_remote_code=trust_remote_code, weights=False)
        return read_config(directory, trust_remote_code=trust_remote_code, hf_overrides=hf_overrides)
    with tempfile.TemporaryDirectory() as directory_of_one:
        shutil.copyfile(path, Path(directory_of_one) / "config.json")
        return configuration(directory_of_one, trust_remote_code=trust_remote_code, hf_overrides=hf_overrides)


def attention_calls(program: SlicedProgram) -> list[tuple[int, ...]]:
    """Return, for each layer, the fields of model_facts.AttentionGroup except its count."""
    return [
        (
            call.q.shape[0],
            call.k.shape[0],
            call.k.shape[0] * head_bytes(call.k.shape[-1], call.v.shape[-1], call.k.dtype),
            call.q_bytes,
            call.kv_bytes,
            call.out_bytes,
            2 * call.q.shape[0] * (call.q.shape[-1] + call.v.shape[-1]),
            AttentionSpec.decode(call.rest[1]).window,
        )
        for call in program.calls
    ]


def _layer_lists(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """Return the configuration's entries that have one value for each layer."""
    text = config.get_text_config(decoder=True)
    return {k: v for k, v in vars(text).items() if isinstance(v, list) and len(v) == num_layers}


def _layer_entries(config: Any, num_layers: int) -> list[Hashable]:
    lists = _layer_lists(config, num_layers)
    return [json.dumps({k: v[i] for k, v in lists.items()}, default=str) for i in range(num_layers)]


def _with_layers(config: Any, num_layers: int, few: int) -> Any:
    """Return the configuration with its first ``few`` layers."""
    less = copy.deepcopy(config)
    text = less.get_text_config(decoder=True)
    text.num_hidden_layers = few
    for key, values in _layer_lists(config, num_layers).items():
        setattr(text, key, values[:few])
    return less
