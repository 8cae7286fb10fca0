"""The memory of a run's workers, from the configuration and the headers of the weights alone.

Slots, blocks and partitions come from the functions that the workers call. The memory of Python, torch and transformers
is measured. For compute and prefill workers it is that of this process, once it has cut the model without its weights,
and CUT_WITH_WEIGHTS. For memory workers it is that of a process that starts as they do and has the same imports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.executor.launchers.local import ProcessWorker
from lamina.facts.worker_memory import WorkerMemory
from lamina.workers.memory.resident_memory import ResidentMemory, resident

if TYPE_CHECKING:
    import torch

    from lamina.config.partition import Partition
    from lamina.converter import SlicedProgram
    from lamina.models.read_shard import WeightBytes
    from lamina.ops.gemm import LinearBackend
    from lamina.protocol.step_plan import LayerShape
    from lamina.workers.compute.kv_capacity import BlockSplit

# More than of one without: values in traces, buffers of the first GEMMs. Measured at 0.7 GB and 8 layers.
CUT_WITH_WEIGHTS = 24 << 20
END_S = 5.0  # for the process that measures to go

Measured = Callable[[], ResidentMemory]


class _RankFacts(NamedTuple):
    """Facts about a rank's model; those of other ranks are alike."""

    weights: WeightBytes
    program: SlicedProgram
    layers: list[LayerShape]
    partition: Partition
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_len: int
    vocab_size: int
    packed: int  # bytes of weights in an order of the linear layers' own, where a worker has them twice; or 0
    shared: int  # bytes of these that the workers of this host share


def workers_memory(model: str, config: EngineConfig, free: int) -> list[WorkerMemory]:
    """Return the memory of every worker on this host, which has ``free`` bytes. Raises ValueError if KV blocks do not
    fit --kv-cache-memory-bytes, or all of them no sequence of --max-model-len; OSError if nothing can be measured.
    """
    from lamina import netstack

    with _memory_runtime(config) as measured:
        facts = rank_facts(model, config, free)
        whole = _prefill_facts(facts, model, config, free)
        working = resident()
        working = working._replace(private=working.private + CUT_WITH_WEIGHTS)
        idle = measured()
    topology, spares = config.topology, config.launch.num_spares
    runtimes = {role: idle if role == "memory" else working for role in topology.num_workers}
    left = free - sum(runtimes[role].private * (n + spares.get(role, 0)) for role, n in topology.num_workers.items())
    left -= _copied(facts) * (topology.num_compute + spares["compute"]) + facts.shared
    left -= _copied(whole) * topology.prefill_groups
    workers = [
        *(_compute(facts, config, i) for i in range(topology.num_compute)),
        *(prefill_memory(whole, config, i, left) for i in range(topology.prefill_workers)),
        *(_memory(facts, config, i, left) for i in range(topology.num_workers["memory"])),
        *(_spare(_compute(facts, config, i), i) for i in range(spares["compute"])),
        *(_spare(_memory(facts, config, 0, left), i) for i in range(spares["memory"])),
    ]
    _check_longest(facts, config, left)
    in_process = netstack.in_process(config.launch.scheme)
    alone = workers[:1] if in_process else workers  # threads of one process have one runtime
    return [*(_run_by(w, runtimes[w.name.partition("-")[0]]) for w in alone), *workers[len(alone) :]]


def _prefill_facts(facts: _RankFacts, model: str, config: EngineConfig, free: int) -> _RankFacts:
    """Return the facts of prefill workers, which have all heads and weights. ``facts``: of a rank."""
    topology = msgspec.structs.replace(config.topology, tensor_parallel_size=1)
    if not topology.prefill_workers or topology == config.topology:
        return facts
    return rank_facts(model, msgspec.structs.replace(config, topology=topology), free)


def _copied(facts: _RankFacts) -> int:
    """Return the bytes of weights that each worker, or each group of stages, has for itself."""
    return facts.weights.copied + facts.packed - facts.shared


def _spare(like: WorkerMemory, number: int) -> WorkerMemory:
    """Return the memory of a spare, which has no channels and computes nothing."""
    role = like.name.partition("-")[0]
    return replace(like, name=f"{role}-spare-{number}", slots=0, workspace=0)


def _run_by(worker: WorkerMemory, runtime: ResidentMemory) -> WorkerMemory:
    return replace(worker, private=runtime.private + runtime.shared, libraries=runtime.files)


@contextmanager
def _memory_runtime(config: EngineConfig) -> Iterator[Measured]:
    """Measures while the block goes on, in a process that starts as memory workers do."""
    worker = ProcessWorker("footprint", 0)
    worker.sock.settimeout(config.deadlines.start_timeout_s)

    def measured() -> ResidentMemory:
        with worker.sock.makefile() as lines:
            line = lines.readline()
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise OSError(f"a memory worker's memory cannot be measured: {answer['error']}")
        return ResidentMemory(*answer["resident"])

    try:
        opened = [config.kv.attention, config.launch.scheme, config.devices.rdma_device]
        worker.sock.sendall(json.dumps(opened).encode() + b"\n")
        yield measured
    finally:
        worker.sock.close()
        worker.join(END_S)


def rank_facts(model: str, config: EngineConfig, free: int) -> _RankFacts:
    from lamina import netstack
    from lamina.kv.stored_format import stored_dtype
    from lamina.models.checkpoint import find_checkpoint, read_config
    from lamina.models.convert import layer_shapes
    from lamina.models.load import max_model_len, weights_dtype
    from lamina.models.meta_capture import check_plannable, plan_cuts
    from lamina.models.quantization.pack_experts import PackedExperts
    from lamina.models.quantization.pack_weights import PackedLayer, replace_layers
    from lamina.models.quantization.quantized_linear import QuantizedLinear
    from lamina.models.quantization.round_to_nearest import BY_NAME
    from lamina.models.read_shard import WHOLE, weight_bytes
    from lamina.models.weight_names import check_all_used
    from lamina.ops import gemm
    from lamina.protocol.capacity import partition_of
    from lamina.workers.device_selection import linear_backend, pick_device

    trust = config.model.trust_remote_code
    directory = find_checkpoint(model, trust_remote_code=trust)
    settings: Any = read_config(directory, trust_remote_code=trust, hf_overrides=config.model.hf_overrides)
    dtype = weights_dtype(directory, settings, config.model.dtype)
    planned = plan_cuts(
        model,
        dtype=str(dtype).removeprefix("torch."),
        trust_remote_code=trust,
        ranks=config.topology.tensor_parallel_size,
        hf_overrides=config.model.hf_overrides,
    )
    check_plannable(planned.program)
    check_all_used(planned.model, directory, allow_unused=config.model.allow_unused_weights)
    layers = layer_shapes(planned.program)
    in_process = netstack.in_process(config.launch.scheme)
    backend = gemm.get(
        linear_backend(config.model.gemm, pick_device("--compute-device", config.devices.compute_device, 0)), 1
    )
    weights = config.topology.of_rank(config.topology.normalized_weights, 0)
    max_len, wire = config.model.max_model_len or max_model_len(settings), planned.program.calls[0].q.dtype
    on_cpu = pick_device("--compute-device", config.devices.compute_device, 0).type == "cpu"
    kept, rounding = list[PackedLayer | PackedExperts](), BY_NAME.get(config.model.quantization)
    if on_cpu:
        kept = replace_layers(
            planned.model, directory, planned.shard or WHOLE, backend, rounding, config.model.quantization_compute
        )
    stored = weight_bytes(planned.model, directory, planned.shard)
    layers_of = [layer for each in kept if isinstance(each, PackedLayer) for layer in each.layers]
    linear = [layer for layer in layers_of if isinstance(layer, QuantizedLinear)]
    quantized = sum(backend.packed_bytes(dtype, layer.out_features, layer.in_features) for layer in linear)
    packed, shared = (0, 0) if in_process else _packed(planned.program, backend, config, stored, free, quantized)
    return _RankFacts(
        weights=stored,
        program=planned.program,
        layers=layers,
        partition=partition_of(config.topology.partition, layers, weights, max_len),
        dtype=wire,
        kv_dtype=stored_dtype(config.kv.kv_cache_dtype, wire),
        max_len=max_len,
        vocab_size=settings.get_text_config().vocab_size,
        packed=packed,
        shared=shared,
    )


def _packed(
    program: SlicedProgram, backend: LinearBackend, config: EngineConfig, stored: WeightBytes, free: int, quantized: int
) -> tuple[int, int]:
    """Bytes of packed weights of a worker, and what of them workers have together: of weights that are mapped.
    ``quantized``: bytes of those that have no second copy.
    """
    from lamina.ops.gemm.packing import can_share, has_room, packed_weights

    needed = sum(size for _, size in packed_weights(program, backend)) - quantized
    together = config.launch.launcher_name == "local" and can_share(config.topology)
    shared = needed * stored.mapped // max(sum(stored), 1) if together else 0
    return (needed, shared) if has_room(needed, shared, free, config.topology, config.devices) else (0, 0)


def _compute(facts: _RankFacts, config: EngineConfig, index: int) -> WorkerMemory:
    from lamina.ops.collective.mesh import INBOX
    from lamina.workers.compute.kv_capacity import channel_bytes
    from lamina.workers.compute.pipeline_comm import pipeline_inbox

    ranks, batches = config.topology.tensor_parallel_size, config.topology.max_batches
    slots = (facts.partition.num_workers + config.topology.kv_parity) * _decode_channel(facts, config)
    slots += (ranks - 1) * channel_bytes(INBOX, INBOX)
    cuts = facts.program.cuts
    if config.topology.replicas > 1:
        inbox = pipeline_inbox([c.tensors for c in cuts], max_rows=config.batching.max_rows, num_batches=batches)
        slots += channel_bytes(inbox, inbox)
    carried = (batches - 1) * config.batching.max_rows * max(c.bytes_per_token for c in cuts)
    device = _device("--compute-device", config.devices.compute_device, config.gpu_index("compute", index))
    return WorkerMemory(
        name=f"compute-{index}",
        device=device,
        mapped=facts.weights.mapped + facts.shared,
        copied=_copied(facts),
        slots=slots,
        workspace=_slices(facts, config) + carried + _graphs(facts, config, device),
    )


def prefill_memory(facts: _RankFacts, config: EngineConfig, index: int, free: int) -> WorkerMemory:
    """``free``: as of ``_memory``."""
    from lamina.config.partition import by_head
    from lamina.kv.stored_format import head_bytes
    from lamina.protocol.prefill_stages import stage_layers
    from lamina.protocol.prefix_fetch import can_cache_prompts
    from lamina.workers.compute.kv_capacity import attention_bytes, channel_bytes, prompt_cache_bytes, store_bytes
    from lamina.workers.prefill.prefix_fetch import prefix_inboxes
    from lamina.workers.prefill.stage_worker import stage_cuts, stage_inboxes

    stages = config.topology.prefill_pipeline
    layers = stage_layers(len(facts.layers), stages, stage := index % stages)
    whole, facts = facts, facts._replace(layers=facts.layers[layers.start : layers.stop])
    alone = by_head([s.kv_heads for s in facts.layers], [1.0], 0)
    one = store_bytes(facts.layers, facts.kv_dtype, facts.max_len, config.kv.block_size)
    chosen = prompt_cache_bytes(one, free, config.topology.prefill_workers)
    attention = attention_bytes(
        facts.layers, alone, 0, facts.kv_dtype, max_rows=config.batching.max_rows, max_len=facts.max_len
    )
    split = _split(facts, config, alone, 0, config.devices.prefill_kv_bytes() or chosen)
    slots, size = config.topology.num_workers["memory"] * _prefill_channel(whole, config), config.kv.block_size
    windows = [group.window for group in split.groups]
    if config.caches_prefixes and can_cache_prompts(windows, split.num_blocks, size, facts.max_len, config.batching):
        block = max(size * s.kv_heads * head_bytes(s.qk_dim, s.v_dim, facts.kv_dtype) for s in facts.layers)
        slots += 2 * (config.topology.prefill_groups - 1) * channel_bytes(*prefix_inboxes(block))
    num_neighbours = (stage > 0) + (stage < stages - 1)  # the stages that what crosses comes from, or goes to
    slots += num_neighbours * channel_bytes(*stage_inboxes(stage_cuts(facts.program), config.batching.max_rows))
    return WorkerMemory(
        name=f"prefill-{index}",
        device=_device("--compute-device", config.devices.compute_device, config.gpu_index("prefill", index)),
        mapped=facts.weights.mapped + facts.shared,
        copied=_copied(facts) // stages,
        kv=split.nbytes,
        slots=slots,
        workspace=_slices(facts, config) + attention,
    )


def _memory(facts: _RankFacts, config: EngineConfig, index: int, free: int) -> WorkerMemory:
    """``free``: for KV blocks that --kv-cache-memory-bytes leaves to the workers."""
    from lamina.workers.compute.kv_capacity import attention_bytes

    # Who keeps the parity of all others has as much as each.
    worker = min(index // config.topology.tensor_parallel_size, facts.partition.num_workers - 1)
    kv = _pool(facts, config, worker, free).nbytes
    channels = config.topology.replicas * _decode_channel(facts, config)
    channels += config.topology.prefill_workers * _prefill_channel(facts, config)
    return WorkerMemory(
        name=f"memory-{index}",
        device=_device("--memory-device", config.devices.memory_device, config.gpu_index("memory", index)),
        kv=kv,
        tokens=_tokens(facts, config, worker, kv) if facts.partition.single_shard else 0,
        slots=channels,
        workspace=attention_bytes(
            facts.layers,
            facts.partition,
            worker,
            facts.kv_dtype,
            max_rows=config.batching.max_rows,
            max_len=facts.max_len,
        ),
    )


def _pool(facts: _RankFacts, config: EngineConfig, worker: int, free: int) -> BlockSplit:
    """Return a memory worker's blocks, by its number among those of its rank; ``free`` as of ``_memory``."""
    from lamina.workers.compute.kv_capacity import choose_kv_bytes

    kv_bytes = config.topology.pool_bytes(config.devices.kv_bytes()) or choose_kv_bytes(
        facts.layers,
        facts.partition,
        worker,
        facts.kv_dtype,
        max_len=facts.max_len,
        max_num_seqs=config.batching.max_num_seqs,
        block_size=config.kv.block_size,
        free=free // config.topology.tensor_parallel_size,
    )
    return _split(facts, config, facts.partition, worker, kv_bytes)


def _check_longest(facts: _RankFacts, config: EngineConfig, free: int) -> None:
    """Raises as a start, where memory workers lend each other stripes."""
    from lamina.ops.attention.merge import CHUNK_TOKENS
    from lamina.protocol.step_plan import BindReply
    from lamina.workers.compute.kv_capacity import check_longest_sequence

    partition, size = facts.partition, config.kv.block_size
    pools = [_pool(facts, config, worker, free) for worker in range(partition.num_workers)]
    bounds = [
        BindReply(
            windows=[group.window for group in pool.groups],
            kv_shards=[group.kv_shards for group in pool.groups],
            stripe_blocks=partition.stripe_chunks * CHUNK_TOKENS // size,
            single_shard=partition.single_shard,
            num_blocks=pool.num_blocks,
        )
        for pool in pools
    ]
    own, more = sum(pool.nbytes for pool in pools), config.topology.extra_kv_bytes(config.devices.kv_bytes())
    check_longest_sequence(bounds, facts.max_len, size, own, more)


def _device(flag: str, asked: str, number: int) -> str:
    from lamina.workers.device_selection import pick_device

    return str(pick_device(flag, asked, number))


def _slices(facts: _RankFacts, config: EngineConfig) -> int:
    """Return the bytes of a step's tensors on a compute worker: activations of a slice, and logits of all that decode.
    Sampling copies logits in fp32 and, one row at a time, in fp64.
    """
    from lamina.models.activation_memory import peak_activation_bytes

    rows, sampled = config.batching.max_rows, config.batching.max_num_seqs
    logits = facts.vocab_size * (8 * sampled + 40)
    return peak_activation_bytes(facts.program, rows=rows, sampled=sampled) + logits


def _graphs(facts: _RankFacts, config: EngineConfig, device: str) -> int:
    """Return the bytes that the CUDA graphs of a compute worker keep."""
    from lamina.models.activation_memory import graph_buffer_bytes
    from lamina.workers.cuda_graphs import MAX_GRAPH_ROWS

    if not device.startswith("cuda") or not config.model.cuda_graphs:
        return 0
    return graph_buffer_bytes(facts.program, rows=MAX_GRAPH_ROWS)


def _split(facts: _RankFacts, config: EngineConfig, partition: Partition, worker: int, kv_bytes: int) -> BlockSplit:
    from lamina.workers.compute.kv_capacity import split_blocks

    return split_blocks(
        facts.layers,
        partition,
        worker,
        facts.kv_dtype,
        kv_bytes,
        block_size=config.kv.block_size,
        max_rows=config.batching.max_rows,
        max_len=facts.max_len,
        sparsity=config.kv,
    )


def _tokens(facts: _RankFacts, config: EngineConfig, worker: int, kv: int) -> int:
    """Return the tokens of one sequence, in whole stripes, that ``kv`` bytes of blocks on ``worker`` hold without
    their null block. If layers have a window, it holds more.
    """
    from lamina.kv.stored_format import head_bytes
    from lamina.ops.attention.merge import CHUNK_TOKENS

    stripe, block = facts.partition.stripe_chunks * CHUNK_TOKENS, config.kv.block_size
    token = sum(
        piece.num_kv_heads * head_bytes(layer.qk_dim, layer.v_dim, facts.kv_dtype)
        for number, layer in enumerate(facts.layers)
        for piece in facts.partition.pieces(number, worker)
    )
    return (kv // token - block) // stripe * stripe


def _decode_channel(facts: _RankFacts, config: EngineConfig) -> int:
    """Slots between a compute worker and one of its memory workers."""
    from lamina.workers.compute.kv_capacity import channel_bytes, inbox_geometries

    rows: dict[str, Any] = {
        "max_rows": config.batching.max_rows,
        "max_len": facts.max_len,
        "num_batches": config.topology.max_batches,
    }
    return channel_bytes(*inbox_geometries(facts.layers, facts.partition, facts.dtype.itemsize, **rows))


def _prefill_channel(facts: _RankFacts, config: EngineConfig) -> int:
    """Slots between a prefill worker and a memory worker."""
    from lamina.workers.compute.kv_capacity import channel_bytes, prefill_inbox_geometries

    size, max_rows, stages = facts.dtype.itemsize, config.batching.max_rows, config.topology.prefill_pipeline
    return channel_bytes(
        *prefill_inbox_geometries(facts.layers, facts.partition, size, max_rows=max_rows, stages=stages)
    )
