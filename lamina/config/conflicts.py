"""The table of settings that exclude or need each other, in the user's own flags.

``check_compatible`` refuses by it what options alone decide. Code that learns the rest later raises the same text by
``conflict_text`` and ``need_text``: of a model's layers, a request, a change while serving, or a sub-command's own
flags. docs/conflicts.md shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any, NamedTuple

from msgspec import structs

from lamina.netstack import in_process, made_at_start
from lamina.netstack.schemes import BY_RDMA

from .engine_config import ONLINE, OVERRIDES_EXAMPLE, EngineConfig
from .flag_groups import flag_name
from .option import MEASURED

IsOn = Callable[[EngineConfig], bool]


class Setting(NamedTuple):
    """A feature as a user asks for it."""

    is_on: IsOn
    example: Mapping[str, Any]  # options that turn it on, with what it needs


_DEFAULTS = EngineConfig()
_GROUP_OF = {
    option: group for group in structs.asdict(_DEFAULTS) for option in structs.asdict(getattr(_DEFAULTS, group))
}


def _value(config: EngineConfig, option: str) -> Any:
    return getattr(getattr(config, _GROUP_OF[option]), option)


def _given(option: str, value: Any, **needs: Any) -> Setting:
    """Return the setting of an ``option`` that has another value than its default, such as ``value``."""
    return Setting(lambda c: _value(c, option) != _value(_DEFAULTS, option), {option: value, **needs})


def _equal(option: str, value: Any, **needs: Any) -> Setting:
    """Return the setting of an ``option`` that is ``value``."""
    return Setting(lambda c: _value(c, option) == value, {option: value, **needs})


def _scheme(config: EngineConfig) -> str:
    try:
        return config.launch.scheme
    except ValueError:  # of one that stays in a process, for workers on other hosts
        return config.launch.transport


def _is_in_process(config: EngineConfig) -> bool:
    try:
        return in_process(_scheme(config))
    except ValueError:  # of an unknown one, which check_names refuses
        return False


def _uses_rdma(config: EngineConfig) -> bool:
    return _scheme(config).rpartition("+")[2].partition("?")[0] in BY_RDMA


_LOANS: dict[str, Any] = {"ledger": "h:1", "partition": "spill"}
_RAY, _STATIC = {"ray_address": "auto"}, {"launcher": "static"}
_TRUNCATE: dict[str, Any] = {"context_overflow": "truncate"}
SETTINGS: dict[str, Setting] = {
    "--deterministic": _given("deterministic", True),
    "--no-enable-prefix-caching": Setting(lambda c: not c.caches_prefixes, {"enable_prefix_caching": False}),
    "--preemption-mode swap": _equal("preemption_mode", "swap", kv_offloading_size="1GiB"),
    "--scheduling-policy priority": _equal("scheduling_policy", "priority"),
    "--kv-offloading-size": _given("kv_offloading_size", "1GiB"),
    "--kv-offload dir=": _given("kv_store_dir", "/kv"),
    "--kv-offload key=": _given("kv_key_file", "/key", kv_store_dir="/kv"),
    "--kv-offload ttl=": _given("kv_store_ttl", "1h", kv_store_dir="/kv"),
    "--kv-offload size=": _given("kv_store_size", "1GiB", kv_store_dir="/kv"),
    "--kv-offload eviction=": _given("kv_eviction_policy", "lfu", kv_offloading_size="1GiB"),
    "--kv-offload on-load-failure=": _given("kv_load_failure_policy", "fail", kv_offloading_size="1GiB"),
    "--decode-only": _given("decode_only", True),
    "--context-overflow truncate": Setting(lambda c: c.overflow.truncates_context, _TRUNCATE),
    "--context-overflow truncate:ratio=": _given("truncate_ratio", 0.25, **_TRUNCATE),
    "--context-overflow truncate:keep-first=": _given("keep_first", 256, **_TRUNCATE),
    "--kv-sparsity evict": Setting(lambda c: c.kv.drops_blocks, {"kv_sparsity": "evict"}),
    "--kv-sparsity evict with --enable-prefix-caching": Setting(
        lambda c: c.kv.drops_blocks and c.batching.enable_prefix_caching is True,
        {"kv_sparsity": "evict", "enable_prefix_caching": True, "kv_offloading_size": "1GiB"},
    ),
    "--kv-sparsity select": Setting(lambda c: c.kv.selects_blocks, {"kv_sparsity": "select"}),
    "--kv-sparsity select:max-kl=": Setting(
        lambda c: c.kv.selects_blocks and bool(c.kv.kv_error_budget),
        {"kv_sparsity": "select", "kv_error_budget": "default"},
    ),
    "--kv-sparsity evict:max-kl=": _given("kv_error_budget", "default", kv_sparsity="evict"),
    **{
        flag_name(name): _given(name, value, kv_sparsity="evict")
        for name, value in {
            "kv_budget": 2048,
            "kv_full_layers": 2,
            "kv_sink": 8,
            "kv_recent": 32,
            "kv_observation_window": 8,
        }.items()
    },
    "--kv-checks": _given("kv_checks", 1.0),
    "--kv-cache-dtype int8 or fp8": _given("kv_cache_dtype", "int8"),
    "--attention-backend native or numba": Setting(
        lambda c: c.kv.attention in ("native", "numba"), {"attention": "native"}
    ),
    "--attention-backend cuda or flashinfer": Setting(
        lambda c: c.kv.attention in ("cuda", "flashinfer"), {"attention": "cuda", "memory_device": "cuda"}
    ),
    "--attention-backend flashinfer": _equal("attention", "flashinfer", memory_device="cuda"),
    "--hf-overrides": _given("hf_overrides", OVERRIDES_EXAMPLE),
    "--quantization": _given("quantization", "awq"),
    "--quantization int8 or int4": Setting(lambda c: c.model.quantization in ONLINE, {"quantization": "int8"}),
    "--quantization-compute int8": _equal("quantization_compute", "int8"),
    "--gemm native": _equal("gemm", "native"),
    "--partition token": _equal("partition", "token"),
    "--partition request": _equal("partition", "request"),
    "--partition spill": _equal("partition", "spill"),
    "--memory-workers 1": _equal("memory_workers", 1),
    "--memory-weights": _given("memory_weights", MEASURED),
    "--memory-weights measured": _equal("memory_weights", MEASURED),
    "--kv-parity 1": _given("kv_parity", 1),
    "--pipeline 2 or more": Setting(lambda c: int(c.topology.pipeline) > 1, {"pipeline": 2}),
    "--pipeline auto": Setting(lambda c: c.topology.measures_pipeline, {"plan": "auto"}),
    "--tensor-parallel-size 2 or more": Setting(
        lambda c: c.topology.tensor_parallel_size > 1, {"tensor_parallel_size": 2}
    ),
    "--tensor-parallel-size 2 or more with --prefill-workers": Setting(
        lambda c: c.topology.tensor_parallel_size > 1 and c.topology.prefill_workers > 0,
        {"tensor_parallel_size": 2, "prefill_workers": 2},
    ),
    "--collective": _given("collective", "mesh", tensor_parallel_size=2),
    "--collective nccl": Setting(
        lambda c: c.topology.collective == "nccl" and c.topology.tensor_parallel_size > 1,
        {"collective": "nccl", "tensor_parallel_size": 2, "compute_device": "cuda"},
    ),
    "--prefill-workers": _given("prefill_workers", 2),
    "--prefill-pipeline": Setting(
        lambda c: c.topology.prefill_pipeline > 1, {"prefill_workers": 2, "prefill_pipeline": 2}
    ),
    "--prefill-kv-memory": _given("prefill_kv_memory", "1GiB", prefill_workers=2),
    "--lending ledger": _given("ledger", "h:1", partition="spill", borrow="1GiB"),
    "--lending place": _given("lending_place", "z/r/h", **_LOANS, borrow="1GiB"),
    "--lending borrow.max": _given("borrow", "1GiB", **_LOANS),
    "--lending borrow.wait_s": _given("borrow_wait_s", 5.0, **_LOANS, borrow="1GiB"),
    "--lending lend.share": _given("lend", 0.5, **_LOANS, kv_memory="1GiB"),
    "--lending lend.address": _given("lend_address", "h:1", **_LOANS, lend=0.5, kv_memory="1GiB"),
    "--lending lend.max_gbps": _given("lend_gbps", 2.0, **_LOANS, lend=0.5, kv_memory="1GiB"),
    "--kv-cache-memory-bytes": Setting(lambda c: bool(c.devices.kv_bytes()), {"kv_memory": "1GiB"}),
    "--compute-device cuda": Setting(lambda c: c.devices.compute_device.startswith("cuda"), {"compute_device": "cuda"}),
    "--compute-device cuda:N": Setting(lambda c: ":" in c.devices.compute_device, {"compute_device": "cuda:1"}),
    "--compute-device auto": _equal("compute_device", "auto"),
    "--memory-device cuda": Setting(lambda c: c.devices.memory_device.startswith("cuda"), {"memory_device": "cuda"}),
    "--memory-device auto": _equal("memory_device", "auto"),
    "--memory-sms": _given("memory_sms", 8, memory_device="cuda"),
    "--rdma-device": _given("rdma_device", "mlx5_0", transport="verbs"),
    "--cores": _given("cores", "auto"),
    "--transport loopback": Setting(_is_in_process, {"transport": "loopback"}),
    "--transport gin": Setting(lambda c: made_at_start(_scheme(c)), {"transport": "gin"}),
    "--transport verbs, mlx5 or auto": Setting(_uses_rdma, {"transport": "verbs"}),
    "--memory-addresses": _given("memory_addresses", "h:1,h:2", memory_workers=2),
    "--launcher local": _equal("launcher", "local"),
    "--launcher ray": Setting(lambda c: c.launch.launcher_name == "ray", {"launcher": "ray", **_RAY}),
    "--launcher static": Setting(lambda c: c.launch.is_static, _STATIC),
    "--cluster": _given("ray_address", "auto"),
    "--cluster FILE with hosts": _given("hosts", "h.yaml", **_STATIC),
    "--ray-wait-s": _given("ray_wait_s", 3.0, **_RAY),
    "--driver": Setting(
        lambda c: any(_value(c, name) != _value(_DEFAULTS, name) for name in ("driver_address", "driver_name")),
        {**_STATIC, "driver_address": "10.0.0.1:7000"},
    ),
    "--spare-compute": _given("spare_compute", 2),
    "--spare-memory": _given("spare_memory", 2),
}

# What only a model, a request or a running engine decides.
NN_MODULE = "a torch.nn.Module as the model"
WINDOWED_LAYERS = "a model with windowed layers"
HYBRID_MODEL = "a hybrid model"
SESSION_ID = "session_id"
SESSION_EVICT = "session_id with --kv-sparsity evict"
SESSION_FILE = "a session's file"
KV_DISCARD = "kv_discard"
PRIORITY = "priority"
PREFILL_POLICY = "--prefill-policy"
OVERLOAD = "--slo overload="
SLO_TTFT = "--slo ttft="
SLO_TBT = "--slo tbt="
SSL_KEYFILE = "--ssl-keyfile"
SSL_CERTFILE = "--ssl-certfile"
JOURNAL = "--journal"
RESIZE = "another number of memory workers while serving"
REWEIGH = "other weights of memory workers while serving"
SCALE = "lamina-launch scale and lamina-launch drain"
DRILL = "lamina-launch drill"
_PLANNED = (  # flags of a plan by devices
    "devices", "device-file", "operators", "rate", "slo-tbt", "prices", "link", "baseline", "gigabyte", "prompts",
)  # fmt: skip
# Flags of sub-commands, which no engine has.
COMMAND_FLAGS = (
    "bench serve --dataset-name",
    "bench serve --dataset-path",
    "drain --host",
    "drain --memory-worker",
    "drain --undo",
    "drill --faults partition",
    "drill --flags '--transport tcp'",
    "explain --kv-cache-memory-bytes",
    "generate --json",
    "generate --logprobs",
    "kv --tenant",
    "kv purge",
    *(f"plan --{name}" for name in ("calibrate", "predict", *_PLANNED)),
    "plan simulate --instances",
    "plan simulate --slo-tbt",
    "sessions --file",
    "sessions --key-file",
    "sessions export or import",
)

# (a, b) -> why no engine has both.
CONFLICTS: dict[tuple[str, str], str] = {
    ("--decode-only", "--deterministic"): "no prompt is computed",
    ("--decode-only", "--context-overflow truncate"): "no prompt is computed",
    ("--decode-only", WINDOWED_LAYERS): "zeros are loaded for whole prompts, not for windows",
    ("--context-overflow truncate", "--deterministic"): "moved KV is not bitwise equal to computed KV",
    ("--kv-sparsity evict", "--context-overflow truncate"): "KV with holes cannot be moved",
    ("--kv-sparsity select", "--context-overflow truncate"): "blocks are chosen by their K, which would change",
    ("--kv-sparsity select", "--memory-device cuda"): "only memory workers on CPUs choose blocks",
    ("--kv-checks", "--memory-device cuda"): "only memory workers on CPUs compare checksums",
    **{
        (sparsity, other): why
        for sparsity in ("--kv-sparsity evict", "--kv-sparsity select")
        for other, why in {
            "--partition token": "a worker compares the blocks of a head only if it has all of them",
            "--partition request": "blocks are compared only with --partition head",
            "--memory-weights measured": "a worker compares the blocks of a head only if it has all of them",
            "--partition spill": "a worker compares the blocks of a head only if it has all of them",
        }.items()
    },
    **{
        (budget, "--prefill-workers"): "max-kl= is measured only on KV that memory workers compute"
        for budget in ("--kv-sparsity select:max-kl=", "--kv-sparsity evict:max-kl=")
    },
    **{
        (offload, other): why
        for offload in ("--kv-offloading-size", "--kv-offload dir=", "--decode-only")
        for other, why in {
            "--no-enable-prefix-caching": "KV is loaded for prefixes that the cache finds",
            "--kv-sparsity select:max-kl=": "max-kl= is measured only on KV that memory workers compute",
            "--kv-sparsity evict:max-kl=": "max-kl= is measured only on KV that memory workers compute",
        }.items()
    },
    ("--decode-only", "--prefill-workers"): "no prompt is computed",
    ("--decode-only", "--kv-offloading-size"): "it loads zeros in place of KV",
    ("--decode-only", "--kv-offload dir="): "it loads zeros in place of KV",
    **{
        (one_pool, other): why
        for one_pool in ("--kv-parity 1", "--lending borrow.max", "--lending lend.share")
        for other, why in {
            "--memory-workers 1": "it needs two or more memory workers",
            "--memory-weights": "memory workers need equal parts",
            "--memory-addresses": "memory workers join and leave, at free addresses",
            "--memory-device cuda": "KV must be in the memory of this host",
            "--memory-device auto": "KV must be in the memory of this host",
            "--transport loopback": "memory workers must be separate processes",
            "--context-overflow truncate": "KV must stay at its place",
            "--kv-sparsity evict": "sequences must keep all KV",
            "--kv-sparsity select": "copied KV has no index of its blocks",
        }.items()
    },
    ("--kv-parity 1", "--launcher ray"): "memory workers must be on this host",
    ("--kv-parity 1", "--launcher static"): "memory workers must be on this host",
    **{
        (lending, other): why
        for lending in ("--lending borrow.max", "--lending lend.share")
        for other, why in {
            "--launcher ray": "a lost loan needs another worker at once, and Ray's places are taken at the start",
            "--launcher static": "a lost loan needs another worker at once, and you start the workers",
            "--pipeline auto": "auto measures memory workers at the start, and loans change them",
            "--decode-only": "all KV must be in the pool",
        }.items()
    },
    **{
        ("--kv-parity 1", partition): "workers have equal shapes only with --partition head"
        for partition in ("--partition token", "--partition request", "--partition spill")
    },
    ("--kv-parity 1", "--kv-cache-dtype int8 or fp8"): "parity does not cover the scales of 8-bit KV",
    ("--attention-backend native or numba", "--memory-device cuda"): "it computes on CPUs",
    ("--attention-backend flashinfer", "--kv-cache-dtype int8 or fp8"): "it stores K and V only as --dtype",
    ("--quantization int8 or int4", "--compute-device cuda"): "weights are packed on CPUs",
    ("--quantization-compute int8", "--compute-device cuda"): "weights are packed on CPUs",
    ("--gemm native", "--compute-device cuda"): "it computes on CPUs",
    ("--pipeline auto", "--pipeline 2 or more"): "it chooses the number of batches, at most N with auto:N",
    ("--tensor-parallel-size 2 or more", "--memory-workers 1"): "each rank has memory workers of its own",
    ("--tensor-parallel-size 2 or more with --prefill-workers", "--deterministic"): (
        "sums over ranks are rounded differently"
    ),
    ("--tensor-parallel-size 2 or more", "--compute-device cuda:N"): "each rank takes a GPU of its own",
    **{
        (joining, "--transport gin"): "gin makes all channels at the start, so no worker can join later"
        for joining in (
            "--spare-compute",
            "--spare-memory",
            "--lending borrow.max",
            "--lending lend.share",
            "--kv-parity 1",
            "--prefill-workers",
        )
    },
    **{
        (spare, other): why
        for spare in ("--spare-compute", "--spare-memory")
        for other, why in {
            "--launcher static": "you start the workers",
            "--transport loopback": "workers are threads, which are not replaced",
            "--cores": "a spare has no cores until it replaces a worker",
        }.items()
    },
    **{
        (spare, device): "spares are for workers on CPUs"
        for spare, role in (("--spare-compute", "compute"), ("--spare-memory", "memory"))
        for device in (f"--{role}-device cuda", f"--{role}-device auto")
    },
    **{
        (option, NN_MODULE): "Lamina does not change a module, so give the directory of a checkpoint"
        for option in (
            "--tensor-parallel-size 2 or more",
            "--hf-overrides",
            "--quantization",
            "--quantization-compute int8",
        )
    },
    ("--spare-compute", NN_MODULE): "the module's compute worker is a thread of this process",
    ("--launcher ray", "--compute-device auto"): "Ray reserves a GPU for each worker with cuda, and none with cpu",
    ("--launcher ray", "--memory-device auto"): "Ray reserves a GPU for each worker with cuda, and none with cpu",
    ("--launcher ray", "--memory-addresses"): "Ray gives the hosts' addresses",
    ("--launcher ray", "--cores"): "Ray gives workers their cores",
    ("--launcher static", "--cores"): "--cores names cores of this host; start the workers under taskset",
    **{
        ("--transport loopback", launcher): "it connects threads of one process, and workers are elsewhere"
        for launcher in ("--launcher ray", "--launcher static")
    },
    ("--transport loopback", "--cores"): "workers are threads of this process",
    ("--cores", NN_MODULE): "the module's compute worker is a thread of this process",
    ("--cluster", "--launcher local"): "it is for --launcher ray",
    ("--cluster", "--launcher static"): "without Ray it must be a YAML of hosts",
    (SESSION_ID, "--no-enable-prefix-caching"): "a session keeps KV of finished requests",
    **{
        (HYBRID_MODEL, other): why
        for other, why in {
            "--partition token": "recurrent states cannot be divided by tokens",
            "--partition spill": "recurrent states cannot be divided by tokens",
            "--kv-parity 1": "parity does not cover recurrent states",
            "--kv-sparsity evict": "recurrent states cannot leave out tokens",
            "--kv-sparsity select": "recurrent states cannot leave out tokens",
            "--context-overflow truncate": "recurrent states cannot leave out tokens",
            "--prefill-pipeline": "one prefill worker has all recurrent states",
            "--tensor-parallel-size 2 or more with --prefill-workers": "ranks divide recurrent states",
            "--memory-device cuda": "recurrent states are computed on CPUs",
            "--preemption-mode swap": "recurrent states are not swapped",
            "--decode-only": "without a prompt there are no recurrent states",
            "--lending borrow.max": "recurrent states cannot be lent",
            "--lending lend.share": "recurrent states cannot be lent",
        }.items()
    },
    (SCALE, "--lending borrow.max"): "loans add and remove memory workers",
    (SCALE, "--lending lend.share"): "loans add and remove memory workers",
    **{
        (change, other): why
        for change in (RESIZE, REWEIGH)
        for other, why in {
            "--transport gin": "gin makes all channels at the start",
            "--context-overflow truncate": "the size of a discarded range depends on the number of memory workers",
            "--kv-sparsity evict": "KV with holes cannot be moved",
            "--kv-sparsity select": "an index of blocks cannot be moved",
            "--memory-device cuda": "KV on a GPU cannot be moved",
            "--memory-device auto": "KV on a GPU cannot be moved",
            "--kv-parity 1": "parity is computed over a fixed number of memory workers",
        }.items()
    },
    (RESIZE, "--memory-addresses"): "each memory worker has an address of its own",
    (RESIZE, "--memory-weights measured"): "the weights were measured for the present memory workers",
    (RESIZE, "--pipeline auto"): "auto has measured the present memory workers",
    ("drain --host", "drain --memory-worker"): "it names all memory workers of a host",
    **{
        ("drain --undo", gone): "a memory worker that has gone does not come back, so ask `scale` for another one"
        for gone in ("drain --host", "drain --memory-worker")
    },
    **{
        (DRILL, elsewhere): "it hits processes of a server of its own, on this host"
        for elsewhere in ("--cluster", "--launcher ray", "--launcher static")
    },
    (DRILL, JOURNAL): "its server has a journal of the drill's own",
    **{
        (f"plan --{name}", "plan --calibrate"): "--calibrate fits a recorded run, and plans nothing"
        for name in _PLANNED
    },
}

# (a, those of which it needs one) -> why.
NEEDS: dict[tuple[str, tuple[str, ...]], str] = {
    ("--preemption-mode swap", ("--kv-offloading-size", "--kv-offload dir=")): "KV of preempted requests is kept there",
    ("--kv-sparsity evict with --enable-prefix-caching", ("--kv-offloading-size", "--kv-offload dir=")): (
        "the pool keeps no KV of sequences that drop some"
    ),
    **{
        (key, ("--kv-sparsity evict", "--kv-sparsity select")): "otherwise all KV stays, and all of it is attended"
        for key in (
            "--kv-sparsity evict:budget=",
            "--kv-sparsity evict:full-layers=",
            "--kv-sparsity evict:sink=",
            "--kv-sparsity evict:recent=",
            "--kv-sparsity evict:max-kl=",
        )
    },
    ("--kv-sparsity evict:window=", ("--kv-sparsity evict",)): "only evict chooses blocks by a prompt's last tokens",
    ("--kv-offload key=", ("--kv-offload dir=",)): "it is the secret of the directory",
    ("--kv-offload ttl=", ("--kv-offload dir=",)): "it is for pages in the directory",
    ("--kv-offload size=", ("--kv-offload dir=",)): "it is the size of the directory",
    ("--context-overflow truncate:ratio=", ("--context-overflow truncate",)): "it says how much is cut",
    ("--context-overflow truncate:keep-first=", ("--context-overflow truncate",)): "it says what is not cut",
    ("--kv-offload eviction=", ("--kv-offloading-size", "--kv-offload dir=")): "pages are kept there",
    ("--kv-offload on-load-failure=", ("--kv-offloading-size", "--kv-offload dir=")): "KV is loaded from there",
    ("--attention-backend cuda or flashinfer", ("--memory-device cuda", "--memory-device auto")): (
        "it computes on GPUs"
    ),
    ("--collective", ("--tensor-parallel-size 2 or more",)): "it says how ranks add up their results",
    ("--collective nccl", ("--compute-device cuda", "--compute-device auto")): "NCCL is for GPUs",
    ("--prefill-pipeline", ("--prefill-workers",)): "it divides the layers among them",
    ("--prefill-kv-memory", ("--prefill-workers",)): "it is their memory",
    ("--lending borrow.max", ("--lending ledger",)): "the ledger finds lenders",
    ("--lending lend.share", ("--lending ledger",)): "the ledger finds borrowers",
    ("--lending ledger", ("--lending borrow.max", "--lending lend.share")): "it is for loans",
    ("--lending place", ("--lending ledger",)): "the ledger proposes the nearest lender",
    ("--lending lend.address", ("--lending lend.share",)): "borrowers connect to it",
    ("--lending lend.max_gbps", ("--lending lend.share",)): "it bounds what borrowers read",
    ("--lending lend.share", ("--kv-cache-memory-bytes",)): "it is a share of that size",
    ("--lending borrow.wait_s", ("--lending borrow.max", "--lending lend.share")): "requests wait for loans",
    ("--lending borrow.max", ("--partition spill",)): "only parts of a sequence are on loan",
    ("--lending lend.share", ("--partition spill",)): "parts of a sequence come back from loans",
    ("--memory-sms", ("--memory-device cuda", "--memory-device auto")): "only a GPU has multiprocessors",
    ("--rdma-device", ("--transport verbs, mlx5 or auto",)): "other transports use no RDMA",
    ("--launcher ray", ("--cluster",)): "Ray's cluster is auto, HOST:PORT, or the YAML of `lamina-launch cluster`",
    ("--ray-wait-s", ("--launcher ray",)): "Ray's autoscaler may start hosts",
    ("--driver", ("--launcher static",)): "workers that you start connect to it",
    ("--cluster FILE with hosts", ("--launcher static",)): "you start the workers on them",
    (SESSION_EVICT, ("--kv-offloading-size", "--kv-offload dir=")): (
        "the pool keeps no KV of sequences that drop some; kv_sparsity none drops none"
    ),
    (KV_DISCARD, ("--context-overflow truncate",)): "KV after the discarded tokens has to move",
    (PRIORITY, ("--scheduling-policy priority",)): "otherwise requests run in order of arrival",
    (PREFILL_POLICY, ("--prefill-workers",)): "it chooses one of them",
    (OVERLOAD, (SLO_TTFT, SLO_TBT)): "it says when the load counts for these limits",
    (SESSION_FILE, ("--kv-offload dir=",)): "the session's KV is there",
    (SSL_KEYFILE, (SSL_CERTFILE,)): "HTTPS needs a certificate and its key",
    (SSL_CERTFILE, (SSL_KEYFILE,)): "HTTPS needs a certificate and its key",
    ("bench serve --dataset-name", ("bench serve --dataset-path",)): "prompts of that kind are read from a file",
    ("explain --kv-cache-memory-bytes", ("--kv-sparsity evict",)): "layers that keep all KV and other layers share it",
    ("generate --logprobs", ("generate --json",)): "only JSON lines show them",
    ("drill --faults partition", ("drill --flags '--transport tcp'",)): "it cuts a TCP connection",
    ("kv --tenant", ("kv purge",)): "it says whose KV goes",
    ("plan --predict", ("plan --calibrate",)): "it predicts by the tables of that run",
    ("plan simulate --slo-tbt", ("plan simulate --instances",)): "it limits instances that decode",
    ("sessions export or import", ("sessions --file",)): "the session is written to that file, or read from it",
    ("sessions --file", ("sessions export or import",)): "they write or read that file",
    ("sessions --file", ("sessions --key-file",)): "the file is encrypted by it",
    ("sessions --key-file", ("sessions --file",)): "it encrypts that file",
}


def check_conflicts(config: EngineConfig) -> None:
    """Raises ValueError, with the table's line, for settings of ``config`` that exclude or need each other."""
    check_together({name for name, setting in SETTINGS.items() if setting.is_on(config)})


def check_together(on: Set[str]) -> None:
    """Raises ValueError, with the table's line, if some of the settings ``on`` exclude each other, or need another."""
    for name, needed in NEEDS:
        if name in on and on.isdisjoint(needed):
            raise ValueError(need_text(name, needed))
    for name, other in CONFLICTS:
        if name in on and other in on:
            raise ValueError(conflict_text(name, other))


def conflicts_of(name: str, config: EngineConfig) -> Iterator[str]:
    """Yield the line of each setting of ``config`` that excludes ``name``, which no options decide."""
    for one, other in CONFLICTS:
        if one == name and other in SETTINGS and SETTINGS[other].is_on(config):
            yield conflict_text(name, other)


def conflict_text(name: str, other: str) -> str:
    """Return the line that refuses two settings. Raises KeyError if they go together."""
    return f"{_as_typed(name)} does not go with {_as_typed(other)}, because {CONFLICTS[name, other]}: leave one out"


def need_text(name: str, needed: Collection[str]) -> str:
    """Return the line that refuses ``name`` without one of ``needed``. Raises KeyError if it needs none."""
    typed, others = _as_typed(name), " or ".join(map(_as_typed, needed))
    fix = f"add it, or leave out {typed}" if typed.startswith("--") or " " not in typed else "add it"
    return f"{typed} needs {others}, because {NEEDS[name, tuple(needed)]}: {fix}"


def _as_typed(name: str) -> str:
    """Return a setting without its sub-command, which has been typed."""
    _, dashes, flag = name.partition(" --")
    return f"--{flag}" if name in COMMAND_FLAGS and dashes else name
