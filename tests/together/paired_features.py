"""The rows of docs/together.md: features that an operator switches on, what their requests have, and their counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, float]  # what a run has counted
Acted = Callable[[Facts], bool]


def more(name: str, than: float = 0.0) -> Acted:
    """Return the test for a count above ``than``."""
    return lambda facts: facts.get(name, 0.0) > than


def always(facts: Facts) -> bool:
    """A feature that cannot be configured without acting on each request."""
    return True


@dataclass(frozen=True)
class Row:
    """A feature. ``options``: of ``LLM``. ``lossy``: its tokens differ from those of plain runs. ``acted``: whether a
    run has used it. ``uses``: what the requests have in addition. ``covers``: options of ``serve`` that are the same
    feature. ``kib``: KV memory of each memory worker, if other than ``KIB``; of a pair, the larger.
    """

    name: str
    options: Mapping[str, Any]
    acted: Acted = always
    lossy: bool = False
    uses: frozenset[str] = field(default_factory=frozenset)
    covers: tuple[str, ...] = ()
    kib: int | None = None


KIB = 2300  # room for 1,150 tokens of fp32 on two memory workers, which is less than a round's sequences need
SESSIONS, LONG, PRIORITY, GRAMMAR, PROMPT_LOGPROBS = "sessions", "long", "priority", "grammar", "prompt_logprobs"
LOADED = more("external_prefix_cache_hits")
CHANGED = "completions that differ from plain ones"
ROWS: tuple[Row, ...] = (
    Row("--no-enable-prefix-caching", {"enable_prefix_caching": False}, lambda facts: not facts["prefix_cache_hits"]),
    Row("--kv-offloading-size", {"kv_offloading_size": "64MiB"}, LOADED),
    Row(
        "--kv-offload dir=", {"kv_store_dir": "DIR"}, LOADED,
        covers=("kv_store_size", "kv_store_ttl", "kv_key_file", "kv_eviction_policy", "kv_load_failure_policy"),
    ),
    Row("--kv-sparsity evict", {"kv_sparsity": "evict", "kv_budget": 128, "kv_recent": 32},
        more("kv_evicted_by_sparsity_blocks"), lossy=True,
        covers=("kv_full_layers", "kv_sink", "kv_observation_window")),
    Row("--kv-sparsity select", {"kv_sparsity": "select", "kv_budget": 128, "kv_recent": 32}, more(CHANGED), lossy=True,
        kib=8192),
    Row("--kv-sparsity select:max-kl=",
        {"kv_sparsity": "select", "kv_budget": 128, "kv_recent": 32, "kv_error_budget": "top1=1,kl=1,shadow=1"},
        more("kv_sparsity_measured_tokens"), lossy=True, kib=8192),
    Row("--kv-cache-dtype int8", {"kv_cache_dtype": "int8"}, more(CHANGED), lossy=True, kib=700),
    Row("--kv-checks 1", {"kv_checks": 1.0}),
    Row("--kv-parity 1", {"kv_parity": 1}, lambda facts: facts["memory workers"] > 2),
    Row("--partition token", {"partition": "token"}),
    Row("--partition request", {"partition": "request"}),
    Row("--partition spill", {"partition": "spill"}, more("remote_bytes")),
    Row("--memory-weights 0.75,0.25", {"memory_weights": (0.75, 0.25)}),
    Row("--context-overflow truncate", {"context_overflow": "truncate", "keep_first": 0},
        lossy=True, uses=frozenset({SESSIONS, LONG}), covers=("truncate_ratio",)),
    Row("--preemption-mode swap", {"preemption_mode": "swap", "kv_offloading_size": "64MiB"}, more("num_preemptions")),
    Row("--scheduling-policy priority", {"scheduling_policy": "priority"}, uses=frozenset({PRIORITY})),
    Row("--pipeline 3", {"pipeline": 3}, more("compute workers", 1)),
    Row("--pipeline auto", {"plan": "auto"}),
    Row("--tensor-parallel-size 2", {"tensor_parallel_size": 2}, more("compute workers", 1)),
    Row("--prefill-workers 1", {"prefill_workers": 1}, more("grant_s"), covers=("prefill_policy", "prefill_kv_memory")),
    Row("--prefill-pipeline 2", {"prefill_workers": 2, "prefill_pipeline": 2}, more("grant_s")),
    Row("--spare-memory 1", {"spare_memory": 1}),
    Row("--spare-compute 1", {"spare_compute": 1}),
    Row("--deterministic", {"deterministic": True}),
    Row("--transport tcp", {"transport": "tcp"}),
    Row("--transport loopback", {"transport": "loopback"}),
    Row("--no-overlap", {"overlap": False}),
    Row("--zero-on-free", {"zero_on_free": True}),
    Row("--attention-backend numba", {"attention": "numba"}),
    Row("session_id", {}, more("session_resumed_turns"), uses=frozenset({SESSIONS})),
    Row("structured output", {}, uses=frozenset({GRAMMAR})),
    Row("prompt_logprobs", {}, uses=frozenset({PROMPT_LOGPROBS})),
)  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
# Options that are in no row -> why.
ELSEWHERE = {
    **dict.fromkeys(
        (
            "dtype", "max_model_len", "trust_remote_code", "allow_unused_weights", "hf_overrides", "quantization",
            "quantization_compute",
        ),
        "of the model",
    ),
    **dict.fromkeys(
        ("gemm", "seed", "max_num_seqs", "prefill_chunk", "block_size", "memory_workers", "kv_memory"), "always on"
    ),
    **dict.fromkeys(("compute_threads", "memory_threads", "cores", "trace"), "the same work on other cores"),
    **dict.fromkeys(
        ("cuda_graphs", "compute_device", "memory_device", "memory_sms", "rdma_device"), "needs other hardware"
    ),
    **dict.fromkeys(
        ("memory_addresses", "launcher", "ray_address", "ray_wait_s", "driver_address", "driver_name", "hosts",
         "placement", "compute_on", "memory_on"),
        "where workers start",
    ),
    **dict.fromkeys(("max_recoveries", "start_timeout_s", "step_timeout_s"), "acts only after a failure"),
    **dict.fromkeys(
        ("borrow", "lend", "ledger", "lending_place", "borrow_wait_s", "lend_address", "lend_gbps"),
        "needs a second deployment",
    ),
    "collective": "--tensor-parallel-size",
    "decode_only": "a measurement; answers mean nothing",
}  # fmt: skip
# Pairs for each run of the tests: of the systems that were built apart.
FAST = (
    ("--kv-offloading-size", "--tensor-parallel-size 2"), ("--kv-offload dir=", "--prefill-workers 1"),
    ("--preemption-mode swap", "--prefill-workers 1"), ("--prefill-workers 1", "session_id"),
    ("--kv-sparsity evict", "--pipeline 3"), ("--kv-sparsity select", "--prefill-workers 1"),
    ("--partition spill", "session_id"), ("--kv-parity 1", "--tensor-parallel-size 2"),
    ("--kv-cache-dtype int8", "--kv-offload dir="), ("structured output", "--tensor-parallel-size 2"),
    ("--pipeline auto", "--prefill-workers 1"), ("--context-overflow truncate", "--tensor-parallel-size 2"),
)  # fmt: skip
# Pairs that CI runs, too.
LONG = (
    ("--kv-offload dir=", "--partition request"), ("--prefill-workers 1", "--pipeline 3"),
    ("--kv-sparsity select", "--tensor-parallel-size 2"), ("--kv-parity 1", "--prefill-workers 1"),
    ("--kv-offload dir=", "--kv-parity 1"), ("--context-overflow truncate", "--kv-offloading-size"),
    ("--preemption-mode swap", "--pipeline 3"), ("--partition request", "--pipeline auto"),
    ("--context-overflow truncate", "--prefill-workers 1"), ("--tensor-parallel-size 2", "--prefill-workers 1"),
    ("--kv-sparsity evict", "--prefill-workers 1"), ("--kv-sparsity evict", "--pipeline auto"),
)  # fmt: skip


def merged(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the options of all ``rows``; None if they set one option to two values."""
    kib = max((row.kib for row in rows if row.kib), default=KIB)
    options: dict[str, Any] = {"kv_memory": f"{kib}KiB"}
    for row in rows:
        for name, value in row.options.items():
            if options.setdefault(name, value) != value:
                return None
    if options.get("partition") == "spill" and "tensor_parallel_size" in options:  # each rank spills to its own workers
        options |= {"memory_workers": 4, "kv_memory": f"{kib // 2}KiB"}
    return options
