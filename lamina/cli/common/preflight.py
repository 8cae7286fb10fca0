"""Checks of a model and a configuration before anything is started; for ``--dry-run``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lamina import netstack
from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name
from lamina.config.resolve import ModelLimits, check_model, check_names, kv_heads_of
from lamina.env import cluster_key
from lamina.executor.transport_choice import choose_transport
from lamina.facts.gpus import why_no_gpu
from lamina.facts.host_memory import check_kv_memory_fits
from lamina.facts.report import count_text
from lamina.models.checkpoint import peek_config
from lamina.observe.log_lines import say

from .phrases import collective_text


def check(model: str, config: EngineConfig) -> int:
    """The longest sequence, in tokens. Raises what a start would: ValueError, naming the flag and the fix; ImportError
    or OSError where this machine lacks what the transport or a backend needs.
    """
    from lamina.models.checkpoint import find_checkpoint

    _check_names(config)
    elsewhere = config.launch.may_span_hosts  # weights, room and the transport are for its hosts to have
    if elsewhere:
        netstack.check_scheme(config.launch.scheme)
    else:
        _open(config.launch.scheme, config.devices.rdma_device)
    directory = find_checkpoint(model, trust_remote_code=config.model.trust_remote_code, weights=not elsewhere)
    return _check_checkpoint(directory, config)


def check_gpus(config: EngineConfig) -> None:
    """Raise ValueError for a GPU that this host surely lacks, before anything is started or imported."""
    for name in ("compute_device", "memory_device"):
        asked = getattr(config.devices, name)
        if asked.startswith("cuda") and not config.launch.may_span_hosts and (why := why_no_gpu()):
            raise ValueError(
                f"{flag_name(name)} {asked}: {why}: use cpu, or a torch built for CUDA on a host with a GPU"
            )


def _open(scheme: str, rdma_device: str) -> None:
    """Says what the transport has to do without on this host. Raises as ``check``."""
    with closing(netstack.open(scheme, key=cluster_key(), device=rdma_device)) as fabric:
        for remark in fabric.remarks:
            say(f"lamina-launch: --transport {scheme}: {remark}", logging.WARNING)


def _check_checkpoint(directory: Path, config: EngineConfig) -> int:
    """Imports torch and transformers, which takes seconds, after ``check`` has refused what it can without them."""
    from lamina.executor.kv_storage import check_store
    from lamina.models.checkpoint import check_quantization, check_room, check_weights, read_config
    from lamina.models.load import weights_dtype
    from lamina.workers import device_selection
    from lamina.workers.memory.kv_store import available_bytes

    given = config.model
    model_config = read_config(directory, trust_remote_code=given.trust_remote_code, hf_overrides=given.hf_overrides)
    limit = check_model(config, _facts(model_config))
    if config.launch.may_span_hosts:
        return limit
    _check_cores(config)
    check_store(config.offload)
    compute, memory = device_selection.check(config)
    check_quantization(directory, given.quantization, given.quantization_compute)
    check_weights(directory)
    weights_dtype(directory, model_config, config.model.dtype)
    free = available_bytes()
    if compute.type == "cpu":
        copies = config.topology.replicas + config.topology.prefill_groups
        check_room(directory, copies, free, given.quantization)
    if memory.type == "cpu":
        check_kv_memory_fits(config, free)
    return limit


def _check_cores(config: EngineConfig) -> None:
    if config.devices.cores:
        from lamina.executor.launchers.local import cores_by_role

        in_process = netstack.in_process(config.launch.scheme)
        cores_by_role(config, {role: 0 if in_process else count for role, count in config.topology.num_workers.items()})


def stated_limit(model: str, config: EngineConfig) -> int:
    """Tokens that no sequence exceeds, as far as the flags and config.json say it at once; a start may find less."""
    _check_names(config)
    raw = peek_config(model, config.model)
    own = raw.get("text_config", raw).get("max_position_embeddings")
    return config.model.max_model_len or (own if isinstance(own, int) else sys.maxsize)


def check_prompts(model: str, config: EngineConfig, prompts: Sequence[str], limit: int) -> Any:
    """The model's tokenizer. Raises ValueError for prompts that sequences of ``limit`` tokens do not hold, TimeoutError
    where it is not loaded within --start-timeout-s.
    """
    from lamina.models.tokenizer import load_in_background, token_ids

    remote, limit_s = config.model.trust_remote_code, config.deadlines.start_timeout_s
    tokenizer = load_in_background(model, trust_remote_code=remote, here=True, limit_s=limit_s).result()
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, which --prompt needs")
    for prompt in prompts:
        count = len(token_ids(tokenizer, prompt))
        if not count:
            raise ValueError(f"--prompt {prompt!r} is empty: it needs at least one token")
        if count >= limit:
            raise ValueError(f"a prompt has {count} tokens; at most {limit - 1} fit (--max-model-len {limit})")
    return tokenizer


def truncation_message(tokenizer: Any, prompts: Sequence[str], max_tokens: int, limit: int) -> str:
    """Return a warning about ``max_tokens`` that not all of the prompts leave room for; "" where they do."""
    from lamina.models.tokenizer import token_ids

    longest = max(len(token_ids(tokenizer, prompt)) for prompt in prompts)
    if longest + max_tokens <= limit:
        return ""
    return (
        f"--max-tokens {max_tokens} is cut to {limit - longest} after a prompt of {longest} tokens: a sequence has "
        f"at most {limit} (--max-model-len)"
    )


def workers_that_would_start(model: str, config: EngineConfig) -> str:
    """The workers of a run and what they take of memory. Raises ValueError where this host has less, naming the fix."""
    if config.launch.may_span_hosts:
        from .cluster_plan import cluster_plan

        return cluster_plan(model, config)
    topology = config.topology
    compute = count_text(topology.num_compute, "compute worker")
    memory = count_text(topology.num_workers["memory"], "memory worker")
    if topology.tensor_parallel_size > 1:
        compute += f" ({count_text(topology.replicas, 'replica')} x {topology.tensor_parallel_size} ranks)"
    if topology.prefill_workers:
        compute += ", " + count_text(topology.prefill_workers, "prefill worker")
        compute += f" (each prompt by {topology.prefill_pipeline})" if topology.prefill_pipeline > 1 else ""
    config, why = choose_transport(config)
    started = f"would start {compute} and {memory} over {config.launch.scheme} for {model}"
    started += f": {why}" if why else ""
    return "\n".join([started, *collective_text(config), _memory_text(model, config)])


def _memory_text(model: str, config: EngineConfig) -> str:
    from lamina.facts.worker_memory import check_fits, memory_text
    from lamina.models.errors import UnsupportedModelError
    from lamina.workers.memory.kv_store import available_bytes

    from .memory_table import workers_memory

    free = available_bytes()
    try:
        workers = workers_memory(model, config, free)
    except UnsupportedModelError as error:  # some operators run on data alone: a start may well do
        return f"  memory: not known without the weights: {error}"
    check_fits(workers, free)
    lent = config.topology.of_rank([w.tokens for w in workers if w.name.startswith("memory")], 0)
    if not any(lent):
        return memory_text(workers, free)
    text = f"  one sequence: {max(lent):,} tokens at home, {sum(lent):,} with what others lend"
    topology, asked = config.topology, config.devices.kv_bytes()
    if topology.may_borrow and asked:
        own = (asked * topology.memory_workers - topology.lent_bytes(asked)) // topology.tensor_parallel_size
        more = topology.extra_kv_bytes(asked) / own
        by = f"{topology.loan_flag} {topology.borrow}" if topology.borrow else "what is lent, once it is back"
        text += f", {int(sum(lent) * (1 + more)):,} with {by}"
    return "\n".join([memory_text(workers, free), text])


def _check_names(config: EngineConfig) -> None:
    from lamina.observe.trace_collection import check_trace_path
    from lamina.ops.attention import BACKENDS
    from lamina.ops.gemm import BACKENDS as LINEAR

    check_trace_path(config.launch.trace)
    check_names(config, BACKENDS, LINEAR)


def _facts(model: Any) -> ModelLimits:
    from lamina.models.load import longest_model_len, max_model_len

    text = model.get_text_config()
    heads = kv_heads_of(lambda name: getattr(text, name, None))
    layers, dim = getattr(text, "num_hidden_layers", 0), getattr(text, "head_dim", 0)
    elements, window = 2 * layers * heads * (dim or 0), getattr(text, "sliding_window", None) or 0
    return ModelLimits(max_model_len(model), heads, elements, window, longest_model_len(model))
