"""The identity of a model's KV: all that K and V depend on except tokens, so that later starts can use KV again.

See kv.page_keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lamina.kv.page_keys import Identity
from lamina.models.quantization.gguf_file import parts_of
from lamina.models.quantization.round_to_nearest import BY_NAME
from lamina.protocol.control import StartCompute
from lamina.protocol.step_plan import LayerShape
from lamina.utils.build_info import build_id

NAMES = "*.safetensors", "*.json", "*.py"  # the files of a checkpoint


def kv_identity(start: StartCompute, loaded: Any, layers: list[LayerShape], dtype: torch.dtype) -> bytes:
    """Return the identity, 32 bytes, the same for all ranks. ``layers``: of one rank. Raises OSError."""
    ranks = start.topology.tensor_parallel_size
    shapes = [(x.q_heads * ranks, x.kv_heads * ranks, x.qk_dim, x.v_dim, x.spec) for x in layers]
    config = loaded.config.to_dict()
    config.pop("_name_or_path", None)
    weights = files_digest(loaded.path) if loaded.path is not None else _values(loaded.model)
    if (rounding := BY_NAME.get(start.model.quantization)) is not None:
        weights = f"{weights} {rounding.name}"
    if start.model.quantization_compute != "auto":
        weights = f"{weights} rows as {start.model.quantization_compute}"
    return Identity(
        weights=weights,
        layers=(*map(str, shapes), _recipe(start), *_selection(start)),
        rope=json.dumps(config, sort_keys=True, default=str),
        wire_dtype=str(dtype),
        kv_dtype=start.kv.kv_cache_dtype,
    ).digest()


def _recipe(start: StartCompute) -> str:
    """Return all that the bits of KV depend on if the model is deterministic; else "", as any computation is good
    enough.
    """
    if not start.model.deterministic:
        return ""
    facts = (start.batching.prefill_chunk, start.topology.tensor_parallel_size, start.model.gemm, start.kv.attention)
    return str((*facts, torch.__version__, build_id()))


def _selection(start: StartCompute) -> list[str]:
    """Return what K and V of answers depend on if their queries select blocks; nothing if not so."""
    kv = start.kv
    if not kv.selects_blocks:
        return []
    return [str((kv.kv_sparsity, kv.kv_budget, kv.kv_full_layers, kv.kv_sink, kv.kv_recent, kv.block_size))]


def files_digest(checkpoint: Path) -> str:
    """Return the digest of a checkpoint: every byte of its files, since two may differ in one tensor alone.
    ``checkpoint``: a directory or a GGUF file.
    """
    digest = hashlib.sha256()
    own = (p for name in NAMES for p in checkpoint.glob(name)) if checkpoint.is_dir() else parts_of(checkpoint)
    for path in sorted(own):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()} ".encode())
    return digest.hexdigest()


def _values(model: nn.Module) -> str:
    """Return the digest of a module whose weights are not in files."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from sorted(model.state_dict().items())
