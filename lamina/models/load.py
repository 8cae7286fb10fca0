"""Loads Hugging Face causal LMs from safetensors; errors say in one line what is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lamina.config.conflicts import NN_MODULE, conflict_text
from lamina.config.engine_config import ModelOptions
from lamina.ops.gemm import LinearBackend

from .attention_routing import WHOLE_MODEL, WeightShard
from .checkpoint import (
    FileStamp,
    check_quantization,
    check_weights,
    file_stamps,
    find_checkpoint,
    is_quantized,
    peek_config,
    read_config,
    stored_weights,
)
from .errors import ModelError
from .model_files import one_line, own_class_text
from .quantization.pack_weights import replace_layers
from .quantization.round_to_nearest import BY_NAME, RoundToNearest
from .read_shard import WHOLE, StoredTensors, read_shard
from .tensor_parallel_shard import plan_shard
from .weight_names import (
    FLOATS,
    AbsentPart,
    WeightNames,
    check_all_used,
    name_first,
    stored_matrices,
    text_weights,
)
from .weight_pages import prefault_weights

# Loading, routing and torch.export change state of the whole process, which several workers may share.
LOAD_LOCK = threading.Lock()

OnProgress = Callable[[str, int, int], None]  # (stage, done, total)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_EMBEDDINGS = 16  # times the stored weights; a few models have factors of their embeddings alone
NO_LIMIT = 1 << 20  # tokens; for models that state no limit


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be cut. ``max_model_len``: tokens of the longest text that it can serve exactly.
    ``longest_model_len``: those that --max-model-len may ask for.
    """

    model: nn.Module
    config: Any  # transformers.PretrainedConfig
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    longest_model_len: int
    dtype: torch.dtype
    path: Path | None  # the checkpoint's directory; None for a module
    part: WeightShard = WHOLE_MODEL  # the loaded part of the weights
    stamps: tuple[FileStamp, ...] = ()  # the weight files' stamps from before they were read


def load(
    source: str | os.PathLike[str] | nn.Module,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    allow_unused_weights: bool = False,
    hf_overrides: str = "",
    quantization: str = "",
    quantization_compute: str = "auto",
    progress: OnProgress | None = None,
    rank: int = 0,
    size: int = 1,
    backend: LinearBackend | None = None,
) -> LoadedModel:
    """Load a model directory or a hub id; a module is used as it is.

    Weights are mapped from their files, and the pages of those for texts are read. If ``dtype`` ("auto": the
    checkpoint's) is that of the file, nothing is copied, and processes of one host share the pages. Each of ``size``
    ranks reads its own part alone. Weights in the files that the model does not use are refused, unless
    ``allow_unused_weights``. The model is in evaluation mode and records no gradients. Raises ModelError.

    ``hf_overrides``: a JSON object as text, whose entries replace those of config.json.

    ``backend``: linear layers of a quantised checkpoint stay packed, as this backend takes them. Other quantised
    weights, and all of them without a backend, become numbers of ``dtype``. ``quantization``: int8 or int4 of linear
    layers that are stored as floats, which needs a backend; or the checkpoint's format. ``quantization_compute``:
    whether rows become int8 for packed weights of integers: "auto" (as the checkpoint says), "int8" or "float".
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}")
    if isinstance(source, nn.Module):
        asked = {
            "--tensor-parallel-size 2 or more": size > 1,
            "--hf-overrides": hf_overrides,
            "--quantization": quantization,
            "--quantization-compute int8": quantization_compute == "int8",
        }
        if names := [name for name, is_asked in asked.items() if is_asked]:
            raise ModelError(conflict_text(names[0], NN_MODULE))
        return _describe(_checked_module(source, dtype), None)
    report = progress or (lambda stage, done, total: None)
    report("opening the checkpoint", 0, 1)  # a hub id may be fetched
    directory = find_checkpoint(source, trust_remote_code=trust_remote_code)
    config = read_config(directory, trust_remote_code=trust_remote_code, hf_overrides=hf_overrides)
    check_quantization(directory, quantization, quantization_compute)
    if (rounding := BY_NAME.get(quantization)) is not None and backend is None:
        raise ModelError(conflict_text("--quantization int8 or int4", "--compute-device cuda"))
    with LOAD_LOCK:  # these make models, during which torch's default dtype is another one
        check_weights(directory)
        _check_size(directory, config)
        kind = weights_dtype(directory, config, dtype)
    report("opening the checkpoint", 1, 1)
    stamps = file_stamps(directory)
    with LOAD_LOCK:
        if size > 1 or is_quantized(directory) or rounding is not None:
            how = rank, size, backend, rounding, quantization_compute
            reader = PartReader(directory, config, kind, trust_remote_code, *how)
            model, part = _read_part(reader, progress)
        else:
            model, part = _from_pretrained(directory, config, kind, trust_remote_code, progress), WHOLE_MODEL
    check_all_used(model, directory, allow_unused=allow_unused_weights)
    if hf_overrides and not (directory / "generation_config.json").exists():
        merged = peek_config(directory, ModelOptions(trust_remote_code=trust_remote_code, hf_overrides=hf_overrides))
        model.generation_config = _generation_config_of(merged)
    _read_ahead(model, directory, progress)
    return replace(_describe(model.eval().requires_grad_(False), directory), part=part, stamps=stamps)


def _check_size(directory: Path, config: Any) -> None:
    """Raise ModelError if the embeddings of a configuration alone are far larger than all stored weights."""
    text = config.get_text_config(decoder=True)
    sizes = [getattr(text, name, None) for name in ("vocab_size", "hidden_size")]
    needed = prod(size if isinstance(size, int) else 0 for size in sizes)
    stored = sum(prod(weight.shape) for weight in stored_weights(directory))
    if needed > _MOST_EMBEDDINGS * stored:
        raise ModelError(
            f"{directory}/config.json describes embeddings of {needed} values, and all stored weights have {stored}: "
            f"fetch the model again"
        )


def prepare_transformers() -> None:
    """Make transformers compute, once in a process, the map from old to new names of weights of all families. That
    takes half of the CPU time of loading a small model, only runs Python, and is the same for all workers.
    """
    with contextlib.suppress(ImportError, AttributeError):  # other versions compute it elsewhere, when they load
        from transformers import conversion_mapping

        conversion_mapping.get_checkpoint_conversion_mapping("")


def from_config(
    source: str | os.PathLike[str] | Any, *, dtype: str = "auto", device: str = "meta", trust_remote_code: bool = False
) -> nn.Module:
    """Return a causal LM of an architecture: a configuration, a directory with a config.json, or a hub id. On the meta
    device it has no weights, takes no memory, and can be planned but not run. Raises ModelError.
    """
    from transformers import PretrainedConfig

    config = source
    if not isinstance(source, PretrainedConfig):
        directory = find_checkpoint(source, trust_remote_code=trust_remote_code, weights=False)
        config = read_config(directory, trust_remote_code=trust_remote_code)
    chosen = DTYPES.get(dtype) or getattr(config, "dtype", None) or torch.float32
    with torch.device(device), _quiet(), absent_parts():
        auto = _auto_class(config)
        model: nn.Module = auto.from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
    return model.eval().requires_grad_(False)


def _auto_class(config: Any) -> Any:
    """Return the class of transformers that makes a model of a configuration. A multimodal one has all of its parts, so
    that its weights have their names; a text runs through those of its language model.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    own_code = getattr(config, "auto_map", None)
    is_multimodal = config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES and not own_code
    return transformers.AutoModelForMultimodalLM if is_multimodal else transformers.AutoModelForCausalLM


@contextlib.contextmanager
def absent_parts() -> Iterator[None]:
    """Put an ``AbsentPart`` in the place of each part of a multimodal model whose package is not installed, such as
    timm for the images of Gemma 3n.
    """
    from transformers import AutoModel

    auto: Any = AutoModel
    own, make = vars(auto)["from_config"], auto.from_config

    def from_config_or_absent(config: Any, **options: Any) -> Any:
        try:
            return make(config, **options)
        except ImportError:
            return AbsentPart()

    auto.from_config = from_config_or_absent
    try:
        yield
    finally:
        auto.from_config = own


def weights_dtype(directory: Path, config: Any, dtype: str) -> torch.dtype:
    """Return the dtype of weights that are loaded from ``directory`` with --dtype ``dtype``. "auto": that of the
    configuration, or of the stored matrices. Raises ModelError if these have several. Vectors may differ, as many
    models have norms and biases in fp32, and so may what transformers keeps in fp32 for this class.
    """
    if dtype in DTYPES:
        return DTYPES[dtype]
    named = {FLOATS[w.dtype]: w.name for w in stored_matrices(directory)}
    if len(named) > 1:
        kept = _kept_in_fp32(config, min(named, key=lambda kind: kind.itemsize))
        named = {FLOATS[w.dtype]: w.name for w in stored_matrices(directory) if w.dtype != "F32" or not kept(w.name)}
    if len(named) > 1:
        kinds = " and ".join(f"{str(kind).removeprefix('torch.')} ({named[kind]})" for kind in sorted(named, key=str))
        raise ModelError(f"{directory} mixes weights of {kinds}: choose one with --dtype")
    chosen: torch.dtype = getattr(config, "dtype", None) or next(iter(named), torch.float32)
    return chosen


def _kept_in_fp32(config: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return whether transformers keeps a stored weight in fp32 in a model of ``dtype``."""
    if getattr(config, "auto_map", None):  # code of its own
        return lambda name: False
    model: Any = from_config(config)
    names = WeightNames(model)
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    return lambda name: any(re.search(pattern, names.find(name).name) for pattern in patterns)


def max_model_len(config: Any) -> int:
    """Return the tokens of the longest text that a model of this configuration serves exactly, unless it is asked for
    more. That is its number of positions, or less if rotary frequencies, masks or scales change for longer texts.
    """
    originals = [r.get("original_max_position_embeddings") for r in _ropes(config) if r.get("rope_type") == "longrope"]
    return min(_lengths([_positions(config), *_other_limits(config), *originals]), default=NO_LIMIT)


def longest_model_len(config: Any) -> int:
    """Return the most tokens that may be asked for, by vLLM's rule. It is the number of positions times the factor of
    the rotary embedding, where its frequencies do not count on fewer. If layers have several, the least one counts.
    Raises ModelError for a factor that is no positive number.
    """
    positions = _positions(config)
    scaled = [_scaled_positions(rope, positions) for rope in _ropes(config)] if positions else []
    return min(_lengths([min(scaled, default=positions), *_other_limits(config)]), default=NO_LIMIT)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings of a model: one set, or one for each type of layer."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [v for v in rope.values() if isinstance(v, dict) and "rope_type" in v] or ([rope] if rope else [])


def _scaled_positions(rope: dict[str, Any], positions: int) -> int:
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return positions
    if not 0 < factor < inf:  # JSON has NaN and Infinity, and transformers only warns
        raise ModelError(f"rope_parameters of the model have factor {factor}: give a positive number")
    return int(factor * ((kind == "yarn" and rope.get("original_max_position_embeddings")) or positions))


def _positions(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    return min(_lengths([getattr(text, key, None) for key in ("max_position_embeddings", "max_seq_len")]), default=0)


def _other_limits(config: Any) -> list[int]:
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, "attention_chunk_size", None)]
    if getattr(text, "attn_temperature_tuning", False):  # scales queries by a position that it counts itself
        limits.append(text.floor_scale - 1)
    return _lengths(limits)


def _lengths(values: Sequence[Any]) -> list[int]:
    return [n for n in values if isinstance(n, int) and n > 0]


def _describe(model: nn.Module, path: Path | None) -> LoadedModel:
    config: Any = model.config
    vocab = config.get_text_config(decoder=True).vocab_size
    return LoadedModel(
        model=model,
        config=config,
        eos_token_ids=tuple(i for i in _eos_token_ids(model) if 0 <= i < vocab),  # no other token can be drawn
        max_model_len=max_model_len(config),
        longest_model_len=longest_model_len(config),
        dtype=_dtype_of(model),
        path=path,
    )


def _eos_token_ids(model: Any) -> list[int]:
    """Return the tokens that end a text, as for ``generate`` of transformers: those of generation_config.json, or of
    config.json if there is no such file. Raises ModelError.
    """
    generation = getattr(model, "generation_config", None)
    source = model.config.get_text_config(decoder=True) if generation is None else generation
    eos = getattr(source, "eos_token_id", None)
    ids = list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    if wrong := [i for i in ids if type(i) is not int]:
        raise ModelError(f"eos_token_id of the model's {type(source).__name__} has {wrong[0]!r}: give ids of tokens")
    return ids


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _checked_module(model: nn.Module, dtype: str) -> nn.Module:
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ModelError(f"{type(model).__name__} is not a Hugging Face model: it has no config")
    own = _dtype_of(model)
    if dtype != "auto" and DTYPES[dtype] != own:
        raise ModelError(f"--dtype {dtype} on a module of {own}: a module is used as it is, call .to({DTYPES[dtype]})")
    return model


def _from_pretrained(
    directory: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool, progress: OnProgress | None
) -> nn.Module:
    try:
        with _quiet(progress), absent_parts():
            model, info = _auto_class(config).from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except Exception as error:  # any class, as architectures have their own code for odd configurations
        own = own_class_text(vars(config)) if getattr(config, "auto_map", None) else ""
        raise ModelError(f"{directory} cannot be loaded: {one_line(error)}{own}") from error
    if wrong := sorted(info["mismatched_keys"]):
        name, got, expected = wrong[0]
        raise ModelError(f"{directory}: {name} is {list(got)} in its file, and {list(expected)} by config.json")
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{directory} lacks weights of {type(model).__name__}: {name_first(missing)}")
    loaded: nn.Module = model
    return loaded


class PartReader(NamedTuple):
    """A rank's part of a checkpoint, as ``_read_part`` takes it."""

    directory: Path
    config: Any
    dtype: torch.dtype
    trust_remote_code: bool
    rank: int
    size: int
    backend: LinearBackend | None
    rounding: RoundToNearest | None = None
    compute: str = "auto"


def _read_part(given: PartReader, progress: OnProgress | None) -> tuple[nn.Module, WeightShard]:
    from safetensors import SafetensorError

    directory, dtype = given.directory, given.dtype
    model = from_config(
        given.config, dtype=str(dtype).removeprefix("torch."), trust_remote_code=given.trust_remote_code
    )
    shard = WHOLE
    if given.size > 1:
        shard = plan_shard(model, given.rank, given.size, max_model_len(given.config))
        shard.shrink_to_shard(model)
    try:
        with _quiet(progress), contextlib.ExitStack() as files:
            tensors = StoredTensors(directory, files)
            if given.backend is None:
                read_shard(model, directory, shard, dtype, tensors)
            else:
                layers = replace_layers(model, directory, shard, given.backend, given.rounding, given.compute)
                packed = {name for each in layers for name in each.stored}
                read_shard(model, directory, shard, dtype, tensors, packed)
                for each in layers:
                    each.fill(tensors.read, given.backend)
            model.generation_config = _generation_config(directory, model)
    except (SafetensorError, RuntimeError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"{directory} cannot be loaded: {one_line(error)}") from error
    shard.attach_collectives(model)
    return model, shard.weight_shard


def _generation_config(directory: Path, model: Any) -> Any:
    """Return the generation_config, as from_pretrained: from config.json if it has no file of its own."""
    from transformers import GenerationConfig

    if not directory.is_dir():
        return _generation_config_of(model.config)
    own = (directory / "generation_config.json").exists()
    source = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    return GenerationConfig.from_pretrained(directory, local_files_only=True, **source)


def _generation_config_of(config: Any) -> Any:
    """Return the generation_config by a configuration, or by the content of a config.json."""
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(config)


def _read_ahead(model: nn.Module, directory: Path, progress: OnProgress | None) -> None:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("reading weights (MB)", done, total)

    try:
        prefault_weights([*(weight for _, weight in text_weights(model)), *model.buffers()], report)
    except OSError as error:
        raise ModelError(f"{directory} cannot be loaded: {one_line(error)}") from error


class _ProgressAdapter:
    """Replaces a tqdm bar, and passes its count on."""

    def __init__(self, report: OnProgress, iterable: Any, total: int) -> None:
        self._report, self._iterable, self._total = report, iterable, total

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._iterable):
            self._report("loading weights", done, self._total)
            yield item
        self._report("loading weights", self._total, self._total)


@contextlib.contextmanager
def _quiet(progress: OnProgress | None = None) -> Iterator[None]:
    """Silence transformers' own bars and notes; ``progress`` receives the count of loaded weights."""
    from transformers.utils import logging

    report = progress or (lambda stage, done, total: None)
    level = logging.get_verbosity()
    previous = logging.set_tqdm_hook(lambda factory, args, kwargs: _ProgressAdapter(report, args[0], len(args[0])))
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.set_tqdm_hook(previous)
