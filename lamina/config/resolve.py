"""The checks of an engine's options, together and for a model. Policy: no torch, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from lamina.netstack import check_scheme
from lamina.netstack.contract.rdma_device_name import Wanted

from .conflicts import WINDOWED_LAYERS, check_conflicts, conflict_text
from .engine_config import EngineConfig
from .option import size_flag
from .partition import PARTITIONS, Partition


def kv_heads_of(config: Callable[[str], Any]) -> int:
    """Return the KV heads by the names that configurations have for them; 0 if it has another name. The workers check
    the real shapes. ``config``: returns an entry by its name, or None.
    """
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
    return next((heads for name in names if isinstance(heads := config(name), int)), 0)


class ModelLimits(NamedTuple):
    """The limits that a model's configuration names; 0 = it does not name one. The workers check the real shapes."""

    max_len: int  # tokens of a sequence at most, unless --max-model-len says more
    kv_heads: int  # of a layer
    token_elements: int  # of a token's K and V, in all layers
    window: int  # tokens
    longest_len: int = 0  # tokens that --max-model-len may say, if they are more than max_len


def check_compatible(config: EngineConfig) -> None:
    """Raises ValueError, in one line that names the flags and the fix, for options that contradict each other."""
    check_conflicts(config)
    _check_addresses(config)
    _check_weights(config)
    _check_ranks(config)
    check_stages(config.topology.prefill_pipeline, config.topology.prefill_workers)
    Wanted.parse(config.devices.rdma_device)


def check_names(config: EngineConfig, attention: Collection[str], gemm: Collection[str]) -> None:
    """Raises ValueError, with the known ones, for a transport or a backend that is in no table. ``attention``,
    ``gemm``: the names of their tables.
    """
    try:
        check_scheme(config.launch.scheme)
    except ValueError as error:
        raise ValueError(f"--transport: {error}") from None
    for name, value, known in (
        ("--attention-backend", config.kv.attention, ("auto", *attention)),
        ("--gemm", config.model.gemm, ("auto", *gemm)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def max_sequence_length(asked: int, own: int, longest: int = 0) -> int:
    """Tokens of a sequence: --max-model-len ``asked`` (0: nothing), of a model for ``own``, or for up to ``longest`` if
    it is asked for them. Raises ValueError.
    """
    if asked > (most := max(own, longest)):
        raise ValueError(
            f"--max-model-len {asked} exceeds the model's own limit of {most} tokens; a rope scaling in config.json or "
            f"--hf-overrides may extend it (docs/use.md)"
        )
    return asked or own


def check_model(config: EngineConfig, model: ModelLimits) -> int:
    """The longest sequence, in tokens. Raises ValueError where workers cannot share or keep ``model`` as asked."""
    max_len = max_sequence_length(config.model.max_model_len, model.max_len, model.longest_len)
    topology, size, heads = config.topology, config.topology.tensor_parallel_size, model.kv_heads
    if heads % size:
        raise ValueError(
            f"--tensor-parallel-size {size} does not divide the model's {heads} KV heads: "
            f"use {' or '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )
    if topology.kv_parity:
        check_equal_heads(heads, topology.memory_workers)
    if heads:
        shared = PARTITIONS[topology.partition]([heads // size], topology.of_rank(topology.normalized_weights, 0), 1)
        if config.kv.is_sparse:
            check_whole_heads(shared, [heads // size], config.kv.kv_sparsity)
    if config.offload.decode_only and model.window:
        raise ValueError(conflict_text("--decode-only", WINDOWED_LAYERS))
    # One sequence takes this for certain: a byte for each element, and no more tokens than the narrowest window has.
    need, workers = model.token_elements * min(max_len, model.window or max_len), topology.memory_workers
    if 0 < config.devices.kv_bytes() * workers < need - topology.borrow_bytes:  # what is lent comes back
        on = f"{workers} memory worker{'s' if workers > 1 else ''}"
        raise ValueError(
            f"--kv-cache-memory-bytes {config.devices.kv_memory} on {on} cannot hold one sequence of {max_len} "
            "tokens, which "
            f"takes {size_flag(need, least=True)} at least: raise it, or lower --max-model-len"
        )
    return max_len


def check_equal_heads(heads: int, workers: int) -> None:
    """Raises ValueError where --kv-parity cannot give each of ``workers`` as many KV heads of a layer."""
    if heads % workers:
        raise ValueError(
            f"--kv-parity 1: {heads} KV heads make no equal parts for --memory-workers {workers}: use a number that "
            f"divides them, or leave it out"
        )


def check_whole_heads(partition: Partition, kv_heads: Sequence[int], kv_sparsity: str) -> None:
    """Raises ValueError where --kv-sparsity ``kv_sparsity`` lacks a head with all tokens on one memory worker.
    ``kv_heads``: of each layer.
    """
    for heads, index in zip(kv_heads, partition.layer_table, strict=True):
        if any(len({*share.owners}) > 1 for share in partition.tables[index]):
            raise ValueError(
                f"--kv-sparsity {kv_sparsity} compares blocks where all tokens of a head are, and {heads} KV "
                f"head{'s' * (heads > 1)} cannot be dealt out whole: use --memory-workers, or --memory-weights, by "
                f"which heads can"
            )


def check_stages(stages: int, workers: int) -> None:
    """Raises ValueError unless --prefill-pipeline ``stages`` divides --prefill-workers ``workers``."""
    if workers % stages:
        raise ValueError(
            f"--prefill-pipeline {stages} does not divide --prefill-workers {workers}: use {stages} or {2 * stages} of "
            f"them, or leave it out"
        )


class LayerPath(enum.Enum):
    """The way of a layer's messages between a compute worker and its memory workers."""

    HOST = enum.auto()  # hosts send them, and bring tensors there and back
    DEVICE = enum.auto()  # kernels send them


def layer_path(partition: Partition, replicas: int, prefill_workers: int, *, kernels: bool) -> LayerPath:
    """The path of an engine's layer messages. ``kernels``: whether kernels of all devices can use the channels, as far
    as the caller knows.

    From device to device each message holds all rows, and one run of heads: no indices of rows, no merging. There must
    be one replica, and no prefill workers: kernels wait for messages in one order, without gaps for prompts.
    """
    if not kernels or replicas > 1 or prefill_workers:
        return LayerPath.HOST
    for table in partition.tables:
        owners = [share.owners[0] for share in table]
        if any(len(share.owners) > 1 for share in table) or len(set(owners)) < len(owners):
            return LayerPath.HOST
    return LayerPath.DEVICE


def _check_addresses(config: EngineConfig) -> None:
    addresses, workers = config.launch.memory_addresses, config.topology.memory_workers
    if addresses and len(addresses) != workers:
        raise ValueError(f"--memory-addresses names {len(addresses)} places for --memory-workers {workers}")
    fixed = [a for a in addresses if a and not a.endswith(":0")]  # port 0 is any free one
    if twice := next((a for a in fixed if fixed.count(a) > 1), None):
        raise ValueError(f"--memory-addresses names {twice} twice: each memory worker needs a place of its own")


def _check_weights(config: EngineConfig) -> None:
    weights, workers = config.topology.normalized_weights, config.topology.memory_workers
    if len(weights) != workers:
        raise ValueError(f"--memory-weights names {len(weights)} weights for --memory-workers {workers}")


def _check_ranks(config: EngineConfig) -> None:
    topology = config.topology
    size, workers, spares = topology.tensor_parallel_size, topology.memory_workers, config.launch.spare_compute
    if workers % size:
        raise ValueError(
            f"--tensor-parallel-size {size}: each rank has memory workers of its own, as many as the others: "
            f"use --memory-workers {size} or {2 * size}, not {workers}"
        )
    weights = topology.normalized_weights
    if any(topology.of_rank(weights, r) != topology.of_rank(weights, 0) for r in range(size)):
        raise ValueError(
            f"--memory-weights {','.join(f'{w:g}' for w in weights)}: memory worker w is rank w mod {size}'s "
            f"(--tensor-parallel-size), and every rank must have the same weights in the same order"
        )
    if spares % size:
        raise ValueError(
            f"--spare-compute {spares} must be a multiple of --tensor-parallel-size {size}: each rank needs its own"
        )
