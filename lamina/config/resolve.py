"""Which options go together. Policy: no torch, no I/O; what a host or a model has is handed in."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import NamedTuple

from lamina.netstack import beyond_host, check_rdma_device, check_scheme, in_process, made_at_start

from .context_overflow import OverflowOptions
from .engine_config import EngineConfig, LaunchOptions
from .flag_groups import flag_name, flag_text
from .option import size_flag
from .partition import PARTITIONS, Partition


class ModelLimits(NamedTuple):
    """The limits that a model's configuration names; 0 = it does not name one. The workers check the real shapes."""

    max_len: int  # tokens of a sequence at most
    kv_heads: int  # of a layer
    token_elements: int  # of a token's K and V, in all layers
    window: int  # tokens


def check_compatible(config: EngineConfig) -> None:
    """Raises ValueError, in one line that names the flags and the fix, for options that contradict each other."""
    _check_launcher(config.launch)
    _check_addresses(config)
    _check_weights(config)
    _check_ranks(config)
    _check_stages(config)
    _check_prefixes(config)
    _check_sparsity(config)
    _check_devices(config)
    check_rdma_device(config.launch.scheme, config.devices.rdma_device)
    _check_made_at_start(config)
    _check_spares(config)
    _check_loans(config)
    _check_parity(config)


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


def max_sequence_length(asked: int, own: int) -> int:
    """Tokens of a sequence: --max-model-len ``asked`` (0: nothing), of a model for ``own``. Raises ValueError."""
    if asked > own:
        raise ValueError(f"--max-model-len {asked} exceeds the model's own limit of {own} tokens")
    return asked or own


def check_model(config: EngineConfig, model: ModelLimits) -> int:
    """The longest sequence, in tokens. Raises ValueError where workers cannot share or keep ``model`` as asked."""
    max_len = max_sequence_length(config.model.max_model_len, model.max_len)
    topology, size, heads = config.topology, config.topology.tensor_parallel_size, model.kv_heads
    if heads % size:
        raise ValueError(
            f"--tensor-parallel-size {size} does not divide the model's {heads} KV heads: "
            f"use {' or '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )
    if topology.kv_parity and heads % topology.memory_workers:
        raise ValueError(
            f"--kv-parity 1: the model's {heads} KV heads make no equal parts for --memory-workers "
            f"{topology.memory_workers}: use a number that divides them, or leave it out"
        )
    if heads:
        shared = PARTITIONS[topology.partition]([heads // size], topology.of_rank(topology.normalized_weights, 0), 1)
        if (config.kv.drops_blocks or config.kv.selects_blocks) and any(
            len(share.owners) > 1 for table in shared.tables for share in table
        ):
            raise ValueError(
                f"--kv-sparsity {config.kv.kv_sparsity} compares blocks where all tokens of a head are, and {heads} "
                f"KV heads cannot be dealt out whole: use --memory-workers, or --memory-weights, by which they can"
            )
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


class LayerPath(enum.Enum):
    """How the messages of a layer go between a compute worker and its memory workers."""

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


def _check_launcher(launching: LaunchOptions) -> None:
    starter, own = launching.launcher_name, LaunchOptions()
    if starter == "ray" and not launching.ray_address:
        raise ValueError("--launcher ray needs --cluster: auto, HOST:PORT, or the YAML of `lamina-launch cluster`")
    belongs = {"ray": ("ray_address", "ray_wait_s"), "static": ("driver_address", "driver_name", "hosts")}
    for owner, names in belongs.items():
        for name in names:
            if owner != starter and getattr(launching, name) != getattr(own, name):
                given = flag_text(name, getattr(launching, name))
                raise ValueError(
                    f"{given} is for --launcher {owner}: leave it out with --launcher {launching.launcher}"
                    + ", or name a YAML of hosts" * (name == "ray_address" and starter == "static")
                )


def _check_addresses(config: EngineConfig) -> None:
    addresses, over_ray = config.launch.memory_addresses, config.launch.launcher_name == "ray"
    workers = config.topology.memory_workers
    if addresses and len(addresses) != workers:
        raise ValueError(f"--memory-addresses names {len(addresses)} places for --memory-workers {workers}")
    fixed = [a for a in addresses if a and not a.endswith(":0")]  # port 0 is any free one
    if twice := next((a for a in fixed if fixed.count(a) > 1), None):
        raise ValueError(f"--memory-addresses names {twice} twice: each memory worker needs a place of its own")
    if not config.launch.may_span_hosts:
        return
    try:
        beyond_host(config.launch.transport)
    except ValueError as error:
        raise ValueError(f"--transport: {error}") from None
    if addresses and over_ray:
        raise ValueError("--memory-addresses are for this machine: over Ray hosts have theirs from Ray")
    if config.devices.cores:
        theirs = "Ray gives workers theirs" if over_ray else "start workers elsewhere under taskset"
        raise ValueError(f"--cores are of this machine: {theirs}")


def _check_made_at_start(config: EngineConfig) -> None:
    """Where no channel may come later, nobody joins a pool that computes."""
    topology, launching = config.topology, config.launch
    if not made_at_start(launching.scheme):
        return
    joins = {
        **{flag_name(f"spare_{role}"): count > 0 for role, count in launching.num_spares.items()},
        topology.loan_flag: topology.may_borrow,
        "--kv-parity": topology.kv_parity > 0,
        "--prefill-workers": topology.prefill_workers > 0,
    }
    if name := next((name for name, is_given in joins.items() if is_given), ""):
        raise ValueError(
            f"{name}: --transport {launching.transport} makes all channels at the start, and nobody joins later: take "
            "another transport, or leave it out"
        )


def _check_spares(config: EngineConfig) -> None:
    launching, size = config.launch, config.topology.tensor_parallel_size
    devices = {"compute": config.devices.compute_device, "memory": config.devices.memory_device}
    for role, count in launching.num_spares.items():
        name = flag_name(f"spare_{role}")
        if not count:
            continue
        if launching.is_static:
            raise ValueError(f"{name} is for --launcher local or ray: people start the workers of static")
        if in_process(launching.scheme):
            raise ValueError(f"{name}: with --transport {launching.transport} no worker is replaced: use shm")
        if devices[role] != "cpu":
            raise ValueError(f"{name} is for workers on CPUs, and --{role}-device is {devices[role]}: leave it out")
        if config.devices.cores:
            raise ValueError(f"{name} cannot go with --cores: a spare has no cores before it takes a place")
        if role == "compute" and count % size:
            raise ValueError(
                f"--spare-compute {count} must be a multiple of --tensor-parallel-size {size}: each rank needs its own"
            )


def _check_loans(config: EngineConfig) -> None:
    topology, launching, own = config.topology, config.launch, LaunchOptions()
    name = topology.loan_flag
    if topology.may_borrow != bool(launching.ledger):
        given, other = (name, "ledger") if topology.may_borrow else (flag_name("ledger"), "borrow.max or lend.share")
        raise ValueError(f"{given} needs {other} in its file: name both, or leave it out")
    for option in ("lend_address", "lend_gbps"):
        if not topology.lend and getattr(launching, option) != getattr(own, option):
            raise ValueError(f"{flag_name(option)} needs lend.share in its file: name both, or leave it out")
    if not topology.may_borrow:
        return
    for option in ("ledger", "lend_address"):
        host, _, port = (value := getattr(launching, option)).rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise ValueError(f"{flag_name(option)} must be HOST:PORT, such as 10.0.0.1:7100, not {value!r}")
    wrong = {
        "--partition spill": topology.partition != "spill",
        "--transport shm or tcp": in_process(launching.scheme),
        **_beyond_equals(config),
        "--kv-cache-memory-bytes SIZE, of which it is a part": topology.lend > 0.0 and not config.devices.kv_bytes(),
    }
    if missing := next((what for what, is_wrong in wrong.items() if is_wrong), ""):
        raise ValueError(
            f"{flag_name('lend') if missing.startswith('--kv-cache-memory-bytes') else name} needs {missing}"
        )


def _beyond_equals(config: EngineConfig) -> dict[str, bool]:
    """What is set beyond several equal memory workers on this host, with all KV in their pool."""
    topology, launching = config.topology, config.launch
    return {
        "--memory-workers 2 or more": topology.memory_workers < 2,
        "--tensor-parallel-size 1": topology.tensor_parallel_size > 1,
        "equal --memory-weights": bool(topology.memory_weights) or topology.measures_pipeline,
        "--launcher local": launching.launcher_name != "local",
        "free places of memory workers": bool(launching.memory_addresses),
        "--memory-device cpu": config.devices.memory_device != "cpu",
        "all KV in the pool": bool(config.offload.backend) or config.overflow.truncates_context,
        "--kv-sparsity none": config.kv.drops_blocks or config.kv.selects_blocks,
    }


def _check_parity(config: EngineConfig) -> None:
    topology = config.topology
    if not topology.kv_parity:
        return
    wrong = {
        "--partition head": topology.partition != "head",
        "--transport shm or tcp, as no thread is replaced": in_process(config.launch.scheme),
        **_beyond_equals(config),
        "--kv-cache-dtype auto": config.kv.kv_cache_dtype != "auto",
    }
    if missing := next((what for what, is_wrong in wrong.items() if is_wrong), ""):
        raise ValueError(f"--kv-parity 1 needs {missing}")


def _check_weights(config: EngineConfig) -> None:
    weights, workers = config.topology.normalized_weights, config.topology.memory_workers
    if len(weights) != workers:
        raise ValueError(f"--memory-weights names {len(weights)} weights for --memory-workers {workers}")


def _check_prefixes(config: EngineConfig) -> None:
    _check_overflow(config)
    tier = config.offload
    if config.batching.preemption_mode == "swap" and not tier.backend:
        raise ValueError(
            "--preemption-mode swap keeps KV beside the pool: say where, by --kv-offloading-size or --kv-offload "
            "dir=, or "
            "leave it out"
        )
    if tier.backend and (config.topology.prefill_workers or not config.caches_prefixes):
        cause = "--prefill-workers" if config.topology.prefill_workers else "--no-enable-prefix-caching"
        raise ValueError(f"{tier.flag} has what --enable-prefix-caching finds: leave it out, or {cause}")
    unlike = {
        "--deterministic": config.model.deterministic,
        "--context-overflow truncate": config.overflow.truncates_context,
    }
    if tier.decode_only and (other := next((name for name, given in unlike.items() if given), "")):
        raise ValueError(f"--decode-only computes no prompt, and {other} is about how that is done: leave one out")


def _check_overflow(config: EngineConfig) -> None:
    own, overflow = OverflowOptions(), config.overflow
    if not overflow.truncates_context:
        for name in ("truncate_ratio", "keep_first"):
            if getattr(overflow, name) != getattr(own, name):
                raise ValueError(f"{flag_name(name)} is for --context-overflow truncate: say that too, or leave it out")
        return
    truncate = "--context-overflow truncate"
    if config.model.deterministic:
        raise ValueError(
            f"{truncate} goes on with KV that has other bits than a computed one: leave out --deterministic"
        )
    if config.topology.tensor_parallel_size > 1:
        raise ValueError(f"{truncate} is not for ranks yet: leave out --tensor-parallel-size")
    if config.topology.prefill_workers:
        raise ValueError(f"{truncate} is not for prefill workers, whose KV nobody moves: leave out --prefill-workers")


def _check_sparsity(config: EngineConfig) -> None:
    kv, name = config.kv, f"--kv-sparsity {config.kv.kv_sparsity}"
    if not (kv.drops_blocks or kv.selects_blocks):
        return
    if config.topology.partition != "head":
        raise ValueError(
            f"{name} compares blocks where all tokens of a head are: use --partition head, not "
            f"{config.topology.partition}"
        )
    if config.topology.prefill_workers:
        raise ValueError(f"{name} is not for prefill workers: leave out --prefill-workers")
    if kv.drops_blocks and config.overflow.truncates_context:
        raise ValueError(f"{name} leaves nothing for a session to go on with: leave out --context-overflow truncate")
    if kv.kv_error_budget and config.offload.backend:
        budget = flag_text("kv_error_budget", kv.kv_error_budget)
        raise ValueError(f"{budget} is not for KV that is loaded: leave out {config.offload.flag}")
    if not kv.selects_blocks:
        return
    if config.overflow.truncates_context:
        raise ValueError(f"{name} is not for keys that move: leave out --context-overflow truncate")
    if config.offload.backend:
        raise ValueError(f"{name} is not for KV that is loaded: leave out {config.offload.flag}")
    if config.devices.memory_device not in ("auto", "cpu"):
        raise ValueError(f"{name} is for memory workers on CPUs: use --memory-device cpu")


def _check_ranks(config: EngineConfig) -> None:
    topology = config.topology
    size, workers = topology.tensor_parallel_size, topology.memory_workers
    if workers % size:
        raise ValueError(
            f"--tensor-parallel-size {size}: each rank has memory workers of its own, as many as the others: "
            f"use --memory-workers {size} or {2 * size}, not {workers}"
        )
    if size > 1 and topology.prefill_workers:
        raise ValueError("--prefill-workers have all weights: use 0 with --tensor-parallel-size > 1")
    weights = topology.normalized_weights
    if any(topology.of_rank(weights, r) != topology.of_rank(weights, 0) for r in range(size)):
        raise ValueError(
            f"--memory-weights {','.join(f'{w:g}' for w in weights)}: memory worker w is rank w mod {size}'s "
            f"(--tensor-parallel-size), and every rank must have the same weights in the same order"
        )


def _check_stages(config: EngineConfig) -> None:
    stages, workers = config.topology.prefill_pipeline, config.topology.prefill_workers
    if stages > 1 and not workers:
        raise ValueError(
            f"--prefill-pipeline {stages} is of prefill workers, and there are none: say --prefill-workers {stages}, "
            f"or leave it out"
        )
    if workers % stages:
        raise ValueError(
            f"--prefill-pipeline {stages} does not divide --prefill-workers {workers}: use {stages} or {2 * stages} of "
            f"them, or leave it out"
        )


def _check_devices(config: EngineConfig) -> None:
    devices, size = config.devices, config.topology.tensor_parallel_size
    if devices.prefill_kv_memory != "auto" and not config.topology.prefill_workers:
        raise ValueError(
            f"--prefill-kv-memory {devices.prefill_kv_memory} is of prefill workers: say how many by "
            f"--prefill-workers, or leave it out"
        )
    for name in ("compute_device", "memory_device"):
        if config.launch.launcher_name == "ray" and getattr(devices, name) == "auto":
            raise ValueError(
                f"{flag_name(name)} auto is for this machine: over Ray say cuda, of which Ray reserves one "
                f"for "
                f"each worker, or cpu"
            )
    if ":" in devices.compute_device and size > 1:
        raise ValueError(
            f"--compute-device {devices.compute_device} is one GPU, and --tensor-parallel-size {size} takes one for "
            f"each rank: use --compute-device cuda"
        )
    if devices.memory_sms and devices.memory_device == "cpu":
        raise ValueError(
            f"--memory-sms {devices.memory_sms} is for memory workers on a GPU: leave it out with --memory-device cpu"
        )
