"""What the workers of a run have in memory, from the configuration and the headers of the weights alone.

Slots, blocks and partitions come from the functions that the workers call. What Python, torch and transformers take is
measured: of compute and prefill workers in this process once it has cut the model without its weights, and what cutting
one with weights leaves behind is added; of memory workers in a process that starts as they do and has imported what
they import.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.facts.memory import WorkerMemory
from lamina.fleet.launchers.local import ProcessWorker
from lamina.memory.footprint import Resident, resident
from lamina.protocol.options.engine import EngineConfig

if TYPE_CHECKING:
    import torch

    from lamina.compute.capacity import BlockSplit
    from lamina.converter import SlicedProgram
    from lamina.gemm import LinearBackend
    from lamina.models.read_shard import WeightBytes
    from lamina.protocol.partition import Partition
    from lamina.protocol.plan import LayerShape

# More than of one without: values in traces, buffers of the first GEMMs. Measured at 0.7 GB and 8 layers.
CUT_WITH_WEIGHTS = 24 << 20
END_S = 5.0  # for the process that measures to go

Measured = Callable[[], Resident]


class _RankFacts(NamedTuple):
    """Of a rank's model; all ranks have the like."""

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
    """Of every worker on this host, which has ``free`` bytes. Raises ValueError where KV blocks do not fit --kv-memory,
    or all of them no sequence of --max-model-len; OSError where nothing can be measured.
    """
    from lamina import netstack

    with _memory_runtime(config) as measured:
        facts = _facts(model, config, free)
        working = resident()
        working = working._replace(private=working.private + CUT_WITH_WEIGHTS)
        idle = measured()
    topology, spares = config.topology, config.launching.spares
    runtimes = {role: idle if role == "memory" else working for role in topology.counts}
    left = free - sum(runtimes[role].private * (n + spares.get(role, 0)) for role, n in topology.counts.items())
    own = facts.weights.copied + facts.packed - facts.shared
    left -= own * (topology.num_compute + topology.prefill_groups + spares["compute"]) + facts.shared
    workers = [
        *(_compute(facts, config, i) for i in range(topology.num_compute)),
        *(_prefill(facts, config, i, left) for i in range(topology.prefill_workers)),
        *(_memory(facts, config, i, left) for i in range(topology.counts["memory"])),
        *(_spare(_compute(facts, config, i), i) for i in range(spares["compute"])),
        *(_spare(_memory(facts, config, 0, left), i) for i in range(spares["memory"])),
    ]
    _check_longest(facts, config, left)
    in_process = netstack.in_process(config.launching.scheme)
    alone = workers[:1] if in_process else workers  # threads of one process have one runtime
    return [*(_run_by(w, runtimes[w.name.partition("-")[0]]) for w in alone), *workers[len(alone) :]]


def _spare(like: WorkerMemory, number: int) -> WorkerMemory:
    """Which has met nobody, and computes nothing."""
    role = like.name.partition("-")[0]
    return replace(like, name=f"{role}-spare-{number}", slots=0, workspace=0)


def _run_by(worker: WorkerMemory, runtime: Resident) -> WorkerMemory:
    return replace(worker, private=runtime.private + runtime.shared, libraries=runtime.files)


@contextmanager
def _memory_runtime(config: EngineConfig) -> Iterator[Measured]:
    """Measures while the block goes on, in a process that starts as memory workers do."""
    worker = ProcessWorker("footprint", 0)
    worker.sock.settimeout(config.deadlines.start_timeout_s)

    def measured() -> Resident:
        with worker.sock.makefile() as lines:
            line = lines.readline()
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise OSError(f"a memory worker's memory cannot be measured: {answer['error']}")
        return Resident(*answer["resident"])

    try:
        opened = [config.kv.attention, config.launching.scheme, config.devices.rdma_device]
        worker.sock.sendall(json.dumps(opened).encode() + b"\n")
        yield measured
    finally:
        worker.sock.close()
        worker.join(END_S)


def _facts(model: str, config: EngineConfig, free: int) -> _RankFacts:
    from lamina import gemm, netstack
    from lamina.kv.stored import stored_dtype
    from lamina.models.checkpoint import find_checkpoint, read_config
    from lamina.models.convert import layer_shapes
    from lamina.models.load import max_model_len, weights_dtype
    from lamina.models.read_shard import weight_bytes
    from lamina.planner.capture import plan_cuts
    from lamina.protocol.groups import partition_of
    from lamina.workers.devices import linear, pick

    trust = config.model.trust_remote_code
    directory = find_checkpoint(model, trust_remote_code=trust)
    settings: Any = read_config(directory, trust_remote_code=trust)
    dtype = weights_dtype(directory, settings, config.model.dtype)
    planned = plan_cuts(
        model,
        dtype=str(dtype).removeprefix("torch."),
        trust_remote_code=trust,
        ranks=config.topology.tensor_parallel_size,
    )
    layers = layer_shapes(planned.program)
    in_process = netstack.in_process(config.launching.scheme)
    backend = gemm.get(linear(config.model.gemm, pick("--compute-device", config.devices.compute_device, 0)), 1)
    weights = config.topology.of_rank(config.topology.weights, 0)
    max_len, wire = config.model.max_model_len or max_model_len(settings), planned.program.calls[0].q.dtype
    stored = weight_bytes(planned.model, directory, planned.shard)
    packed, shared = (0, 0) if in_process else _packed(planned.program, backend, config, stored, free)
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
    program: SlicedProgram, backend: LinearBackend, config: EngineConfig, stored: WeightBytes, free: int
) -> tuple[int, int]:
    """Bytes of packed weights of a worker, and what of them workers have together: of weights that are mapped."""
    from lamina.gemm.packing import has_room, may_share, packed_weights

    needed = sum(size for _, size in packed_weights(program, backend))
    together = config.launching.starter == "local" and may_share(config.topology)
    shared = needed * stored.mapped // max(sum(stored), 1) if together else 0
    return (needed, shared) if has_room(needed, shared, free, config.topology, config.devices) else (0, 0)


def _compute(facts: _RankFacts, config: EngineConfig, index: int) -> WorkerMemory:
    from lamina.collective.mesh import INBOX
    from lamina.compute.capacity import channel_bytes
    from lamina.compute.ring import ring_inbox

    ranks, batches = config.topology.tensor_parallel_size, config.topology.most_batches
    slots = (facts.partition.num_workers + config.topology.kv_parity) * _decode_channel(facts, config)
    slots += (ranks - 1) * channel_bytes(INBOX, INBOX)
    cuts = facts.program.cuts
    if config.topology.replicas > 1:
        inbox = ring_inbox([c.tensors for c in cuts], max_rows=config.batching.max_rows, num_batches=batches)
        slots += channel_bytes(inbox, inbox)
    carried = (batches - 1) * config.batching.max_rows * max(c.bytes_per_token for c in cuts)
    return WorkerMemory(
        name=f"compute-{index}",
        device=_device("--compute-device", config.devices.compute_device, config.gpu_number("compute", index)),
        part=index % ranks,
        mapped=facts.weights.mapped + facts.shared,
        copied=facts.weights.copied + facts.packed - facts.shared,
        slots=slots,
        workspace=_slices(facts, config) + carried,
    )


def _prefill(facts: _RankFacts, config: EngineConfig, index: int, free: int) -> WorkerMemory:
    """``free``: as of ``_memory``."""
    from lamina.compute.capacity import attention_bytes, channel_bytes, prompt_bytes, store_bytes
    from lamina.compute.prefill.beginnings import prompts_inboxes
    from lamina.compute.prefill.stages import stage_cuts, stage_inboxes
    from lamina.kv.stored import head_bytes
    from lamina.protocol.beginnings import has_beginnings
    from lamina.protocol.partition import by_head
    from lamina.protocol.stages import stage_layers

    stages = config.topology.prefill_pipeline
    layers = stage_layers(len(facts.layers), stages, stage := index % stages)
    whole, facts = facts, facts._replace(layers=facts.layers[layers.start : layers.stop])
    alone = by_head([s.kv_heads for s in facts.layers], [1.0], 0)
    one = store_bytes(facts.layers, facts.kv_dtype, facts.max_len, config.kv.block_size)
    chosen = prompt_bytes(one, free, config.topology.prefill_workers)
    attention = attention_bytes(
        facts.layers, alone, 0, facts.kv_dtype, max_rows=config.batching.max_rows, max_len=facts.max_len
    )
    split = _split(facts, config, alone, 0, config.devices.prefill_kv_bytes() or chosen)
    slots, size = config.topology.counts["memory"] * _prefill_channel(whole, config), config.kv.block_size
    windows = [group.window for group in split.groups]
    if config.keeps_prefixes and has_beginnings(windows, split.num_blocks, size, facts.max_len, config.batching):
        block = max(size * s.kv_heads * head_bytes(s.qk_dim, s.v_dim, facts.kv_dtype) for s in facts.layers)
        slots += 2 * (config.topology.prefill_groups - 1) * channel_bytes(*prompts_inboxes(block))
    beside = (stage > 0) + (stage < stages - 1)  # the stages that what crosses comes from, or goes to
    slots += beside * channel_bytes(*stage_inboxes(stage_cuts(facts.program), config.batching.max_rows))
    return WorkerMemory(
        name=f"prefill-{index}",
        device=_device("--compute-device", config.devices.compute_device, config.gpu_number("prefill", index)),
        mapped=facts.weights.mapped + facts.shared,
        copied=(facts.weights.copied + facts.packed - facts.shared) // stages,
        kv=split.nbytes,
        slots=slots,
        workspace=_slices(facts, config) + attention,
    )


def _memory(facts: _RankFacts, config: EngineConfig, index: int, free: int) -> WorkerMemory:
    """``free``: for KV blocks that --kv-memory leaves to the workers."""
    from lamina.compute.capacity import attention_bytes

    # Who keeps the parity of all others has as much as each.
    worker = min(index // config.topology.tensor_parallel_size, facts.partition.num_workers - 1)
    kv = _pool(facts, config, worker, free).nbytes
    channels = config.topology.replicas * _decode_channel(facts, config)
    channels += config.topology.prefill_workers * _prefill_channel(facts, config)
    return WorkerMemory(
        name=f"memory-{index}",
        device=_device("--memory-device", config.devices.memory_device, config.gpu_number("memory", index)),
        kv=kv,
        tokens=_tokens(facts, config, worker, kv) if facts.partition.stays else 0,
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
    """Of a memory worker, by its number among those of its rank; ``free`` as of ``_memory``."""
    from lamina.compute.capacity import choose_kv_bytes

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
    from lamina.attention.merge import CHUNK_TOKENS
    from lamina.compute.capacity import check_longest
    from lamina.protocol.plan import Bound

    partition, size = facts.partition, config.kv.block_size
    pools = [_pool(facts, config, worker, free) for worker in range(partition.num_workers)]
    bounds = [
        Bound(
            windows=[group.window for group in pool.groups],
            lanes=[group.lanes for group in pool.groups],
            stripe=partition.stripe * CHUNK_TOKENS // size,
            stays=partition.stays,
            num_blocks=pool.num_blocks,
        )
        for pool in pools
    ]
    own, more = sum(pool.nbytes for pool in pools), config.topology.more_bytes(config.devices.kv_bytes())
    check_longest(bounds, facts.max_len, size, own, more)


def _device(flag: str, asked: str, number: int) -> str:
    from lamina.workers.devices import pick

    return str(pick(flag, asked, number))


def _slices(facts: _RankFacts, config: EngineConfig) -> int:
    """Tensors of a step on a compute worker: activations of a slice, then the logits of all that decode, which sampling
    copies in fp32 and, of one row at a time, in fp64.
    """
    from lamina.models.activations import most_bytes

    rows, sampled = config.batching.max_rows, config.batching.max_num_seqs
    logits = facts.vocab_size * (8 * sampled + 40)
    return most_bytes(facts.program, rows=rows, sampled=sampled) + logits


def _split(facts: _RankFacts, config: EngineConfig, partition: Partition, worker: int, kv_bytes: int) -> BlockSplit:
    from lamina.compute.capacity import split_blocks

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
    """Of one sequence, in whole stripes, that ``kv`` bytes of blocks on ``worker`` hold beside their null block. Where
    layers have a window it holds more.
    """
    from lamina.attention.merge import CHUNK_TOKENS
    from lamina.kv.stored import head_bytes

    stripe, block = facts.partition.stripe * CHUNK_TOKENS, config.kv.block_size
    token = sum(
        piece.num_kv_heads * head_bytes(layer.qk_dim, layer.v_dim, facts.kv_dtype)
        for number, layer in enumerate(facts.layers)
        for piece in facts.partition.pieces(number, worker)
    )
    return (kv // token - block) // stripe * stripe


def _decode_channel(facts: _RankFacts, config: EngineConfig) -> int:
    """Slots between a compute worker and one of its memory workers."""
    from lamina.compute.capacity import channel_bytes, geometries

    rows = {"max_rows": config.batching.max_rows, "max_len": facts.max_len, "num_batches": config.topology.most_batches}
    return channel_bytes(*geometries(facts.layers, facts.partition, facts.dtype.itemsize, **rows))


def _prefill_channel(facts: _RankFacts, config: EngineConfig) -> int:
    """Slots between a prefill worker and a memory worker."""
    from lamina.compute.capacity import channel_bytes, kv_geometries

    size, max_rows, stages = facts.dtype.itemsize, config.batching.max_rows, config.topology.prefill_pipeline
    return channel_bytes(*kv_geometries(facts.layers, facts.partition, size, max_rows=max_rows, stages=stages))
