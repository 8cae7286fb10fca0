"""The options of an engine, each declared once: name, type, default, range and help text.

The engine reads these structs, and a start message embeds the structs that its worker needs. A struct checks its own
fields, where it is made and where it is decoded; ``resolve`` checks which options go together. Flags of
``lamina-launch`` and keywords of ``LLM`` have the names of the fields.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from lamina.netstack import HERE, beyond_host
from lamina.netstack.contract.channel_terms import NAME_BYTES
from lamina.utils.cpu_cores import Cores

from .context_overflow import OverflowOptions
from .flag_groups import flag_name
from .offload import OffloadOptions
from .option import (
    Choices,
    Options,
    ParsedBy,
    check_size,
    is_object,
    parse_core_lists,
    parse_list,
    parse_object,
    parse_optional,
    parse_size,
    strip_torch_prefix,
)
from .sparsity import SparsityOptions
from .topology import TopologyOptions

CHUNK_TOKENS = 128  # of ops.attention.merge, which needs torch
MOST_THREADS = 1024
PLACEMENTS = ("pack", "spread")
LAUNCHERS = ("auto", "local", "ray", "static")  # of fleet.launcher, which is a room above
DTYPES = ("auto", "float32", "bfloat16", "float16")
SCHEDULING_POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("auto", "recompute", "swap")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")  # of kv.stored_format, which needs torch
QUANTIZATION_COMPUTE = ("auto", "int8", "float")
ONLINE = ("int8", "int4")  # of floats, while they are loaded
# vLLM's names of stored formats, and of its kernels for two of them.
METHODS = (
    "awq",
    "awq_marlin",
    "compressed-tensors",
    "fp8",
    "gguf",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
)
OVERRIDES_EXAMPLE = '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'
_DEVICE = re.compile(r"cpu|auto|cuda(:\d{1,4})?")


class ModelOptions(Options, frozen=True, kw_only=True):
    """The model, as compute and prefill workers load and run it."""

    dtype: Annotated[
        str,
        Choices(DTYPES),
        ParsedBy(strip_torch_prefix),
        "type of weights, KV cache and messages: auto (as stored), float32, bfloat16, float16",
    ] = "auto"
    max_model_len: Annotated[int, Meta(ge=0), "tokens of a sequence, prompt included; 0 = the model's own limit"] = 0
    trust_remote_code: Annotated[bool, "run Python code that ships with the model"] = False
    allow_unused_weights: Annotated[
        bool, "start even if the files have weights that the model does not use; these are ignored"
    ] = False
    hf_overrides: Annotated[
        str,
        ParsedBy(parse_object),
        "JSON with entries that replace those of config.json, as in vLLM, such as rope_parameters. In a nested "
        "configuration, such as text_config, other entries stay",
    ] = ""
    quantization: Annotated[
        str,
        ParsedBy(parse_optional),
        "int8 or int4: round linear layers of a float checkpoint while loading (lm_head: int8). The format of a "
        "quantised checkpoint is found without this flag; vLLM's name of it, such as awq, is accepted",
    ] = ""
    quantization_compute: Annotated[
        str,
        Choices(QUANTIZATION_COMPUTE),
        "activations that int4 and int8 weights multiply on CPUs: int8, by a scale for each row (faster for several), "
        "float (as --dtype), or auto (as the checkpoint says)",
    ] = "auto"
    deterministic: Annotated[
        bool,
        "make results independent of other requests in the batch, except for rounding after a preemption; slower",
    ] = False
    gemm: Annotated[str, "operators of the compute workers: native, torch, or auto (the first that works)"] = "auto"
    cuda_graphs: Annotated[
        bool, "on GPUs, run slices of up to 256 rows, and memory workers' decode steps, as CUDA graphs"
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_object(self.hf_overrides):
            raise ValueError(
                f"--hf-overrides must be a JSON object, such as {OVERRIDES_EXAMPLE}, not {self.hf_overrides!r}"
            )
        if self.quantization not in ("", *ONLINE, *METHODS):
            raise ValueError(
                f"--quantization must be {' or '.join(ONLINE)}, or the format of a quantised checkpoint "
                f"({', '.join(METHODS)}), not {self.quantization!r}"
            )


class KVOptions(SparsityOptions, frozen=True, kw_only=True):
    """The options of stored K and V, and of attention."""

    kv_cache_dtype: Annotated[
        str,
        Choices(KV_CACHE_DTYPES),
        "type of stored K and V: auto (as --dtype), or 8 bits with a scale for each token and head: int8, fp8 (E4M3)",
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1), "tokens in a KV block"] = 32
    overlap: Annotated[
        bool, "memory workers attend stored tokens as soon as they have Q, while K and V of new tokens are computed"
    ] = True
    attention: Annotated[
        str, "attention of the memory workers: native, numba, reference, or auto (the first that works)"
    ] = "auto"

    kv_checks: Annotated[
        float,
        Meta(ge=0.0, le=1.0),
        "share of a step's KV blocks whose checksums memory workers compare before they attend them; a worker with "
        "damaged memory is replaced. 1 = all blocks, 0 = none",
    ] = 0.0
    zero_on_free: Annotated[
        bool,
        "overwrite freed KV blocks with zeros; copies in message buffers and in heaps stay",
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if CHUNK_TOKENS % self.block_size:
            raise ValueError(f"--block-size must divide {CHUNK_TOKENS}, not {self.block_size}: use 16, 32 or 64")
        self.check_budget(self.block_size)


class BatchingOptions(Options, frozen=True, kw_only=True):
    """The options by which requests share steps."""

    max_num_seqs: Annotated[int, Meta(ge=1), "sequences that decode at once"] = 64
    prefill_chunk: Annotated[
        int, Meta(ge=1), "the most prompt tokens in a step; other requests decode between these chunks"
    ] = 512
    enable_prefix_caching: Annotated[
        bool | None,
        "keep the KV of finished requests until its blocks are needed, for prompts that begin with the same tokens. "
        "Unset = yes, unless the model is a torch.nn.Module, whose weights may change",
    ] = None
    preemption_mode: Annotated[
        str,
        Choices(PREEMPTION_MODES),
        "what happens to the KV of a preempted sequence: recompute, or swap (saved to --kv-offloading-size or "
        "--kv-offload dir=, and loaded). auto = what takes less time, as measured; with --deterministic swap, if "
        "there is storage",
    ] = "auto"
    scheduling_policy: Annotated[
        str,
        Choices(SCHEDULING_POLICIES),
        "which request comes first: fcfs, by arrival; priority, by the field `priority` of requests, lower ones "
        "first, then by arrival. Any client may set it, so use priority only if clients trust each other",
    ] = "fcfs"
    seed: Annotated[int, Meta(ge=0), "seed from which requests without a seed get theirs"] = 0

    @property
    def max_rows(self) -> int:
        """Rows of a step at most: every sequence decodes one token, and one prefill chunk comes with them."""
        return self.max_num_seqs + self.prefill_chunk


class DeviceOptions(Options, frozen=True, kw_only=True):
    """The devices, memory, threads and cores that workers take of their hosts."""

    compute_device: Annotated[
        str,
        "device of compute and prefill workers: cpu, cuda (a GPU for each, in turn), cuda:N, or auto (cuda if torch "
        "finds a GPU). The default is cpu until GPUs have been measured",
    ] = "cpu"
    memory_device: Annotated[str, "the same for memory workers; the KV cache is in the memory of this device"] = "cpu"
    memory_sms: Annotated[
        int,
        Meta(ge=0),
        "multiprocessors of its GPU that a memory worker may use, so that others are left for compute workers; 0 = all",
    ] = 0
    rdma_device: Annotated[
        str,
        "with --transport verbs, mlx5 or auto: the RDMA device of each worker, NAME, NAME:PORT or "
        "NAME:PORT:GID_INDEX; empty = LAMINA_RDMA_DEVICE of each host, else the nearest device",
    ] = ""
    kv_memory: Annotated[
        str, ParsedBy(check_size), "memory for KV blocks on each memory worker, such as 512MiB or 4GiB"
    ] = "auto"
    prefill_kv_memory: Annotated[
        str,
        ParsedBy(check_size),
        "memory on each prefill worker for the K and V of its prompt and of earlier prompts, such as 4GiB. auto = room "
        "for 8 of the longest prompts; all workers together take at most an eighth of the free memory",
    ] = "auto"
    compute_threads: Annotated[int, Meta(ge=0, le=MOST_THREADS), "threads of the compute worker; 0 = all cores"] = 0
    memory_threads: Annotated[
        int, Meta(ge=0, le=MOST_THREADS), "threads of each memory worker; 0 = an equal share of the cores"
    ] = 0
    cores: Annotated[
        tuple[Cores, ...] | str,
        ParsedBy(parse_core_lists),
        "cores of each worker (compute workers, then memory workers, then prefill workers), such as 0-3/4,5/6,7. "
        "auto = separate cores for workers that run at once; empty = the system chooses",
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("compute_device", "memory_device"):
            if not _DEVICE.fullmatch(getattr(self, name)):
                raise ValueError(f"{flag_name(name)} must be cpu, cuda, cuda:N or auto, not {getattr(self, name)!r}")
        self.kv_bytes()
        self.prefill_kv_bytes()

    def prefill_kv_bytes(self) -> int:
        """``prefill_kv_memory`` in bytes; 0 = choose at start. Raises ValueError on anything else than a size."""
        return 0 if self.prefill_kv_memory == "auto" else parse_size(self.prefill_kv_memory, "--prefill-kv-memory")

    def kv_bytes(self) -> int:
        """``kv_memory`` in bytes; 0 = choose at start. Raises ValueError on anything else than a size."""
        return 0 if self.kv_memory == "auto" else parse_size(self.kv_memory, "--kv-cache-memory-bytes")


class LaunchOptions(Options, frozen=True, kw_only=True):
    """The places where workers start, and their transport."""

    transport: Annotated[
        str,
        "transport between compute and memory workers: shm, tcp, loopback (all in one process), auto, cuda, verbs, "
        "mlx5, gin. Empty = shm, loopback if all workers compute on one GPU, or auto on other hosts",
    ] = ""
    memory_addresses: Annotated[
        tuple[str, ...],
        ParsedBy(parse_list),
        "addresses at which memory workers listen, one for each, separated by commas; empty = any free ones",
    ] = ()
    launcher: Annotated[
        str,
        Choices(LAUNCHERS),
        "who starts the workers: local (this process, here), ray, static (you, by commands that are printed), or auto "
        "(ray with --cluster, else local)",
    ] = "auto"
    ray_address: Annotated[
        str,
        "start workers through Ray: auto (this host's cluster), HOST:PORT, or the YAML of `lamina-launch cluster`, "
        "which may have placement. With --launcher static: the YAML of the workers' hosts. Empty = start them on "
        "this host, or where you run the printed commands",
    ] = ""
    ray_wait_s: Annotated[float, "over Ray: seconds to wait for hosts that its autoscaler may start"] = 0.0
    driver_address: Annotated[
        str,
        "with --launcher static: the address to which workers connect; port 0 = any free one. NAME distinguishes "
        "this engine from others with the same key; without it each start makes a new name, which the printed "
        "commands contain",
    ] = "127.0.0.1:0"
    driver_name: Annotated[str, "the name before @"] = ""
    hosts: Annotated[str, "the YAML of --cluster, with --launcher static"] = ""
    placement: Annotated[
        str, Choices(PLACEMENTS), "workers on few hosts, near each other (pack), or on many (spread)"
    ] = "pack"
    compute_on: Annotated[str, "a property of hosts for compute workers: a resource, a type of GPU, or LABEL=VALUE"] = (
        "lamina_compute"
    )
    memory_on: Annotated[str, "the same for memory workers"] = "lamina_memory"
    max_recoveries: Annotated[
        int,
        Meta(ge=0),
        "the most recoveries in ten minutes, with --launcher local or ray: a lost worker is replaced, and all "
        "requests continue. One more ends the run; 0 = the first loss ends it",
    ] = 5
    spare_compute: Annotated[
        int,
        Meta(ge=0),
        "with --launcher local or ray, on CPUs: compute workers that are loaded and wait to take the place of a lost "
        "one; a multiple of --tensor-parallel-size",
    ] = 0
    spare_memory: Annotated[
        int, Meta(ge=0), "the same for memory workers; each takes --kv-cache-memory-bytes even while it is a spare"
    ] = 0
    ledger: Annotated[str, "the ledger of lenders, HOST:PORT of `lamina-launch ledger serve`"] = ""
    borrow_wait_s: Annotated[
        float, Meta(gt=0.0), "seconds that a request waits for memory to borrow; then it fails"
    ] = 60.0
    lend_address: Annotated[str, "the address to which borrowers connect, HOST:PORT; port 0 = any free one"] = (
        "127.0.0.1:0"
    )
    lend_gbps: Annotated[
        float,
        Meta(ge=0.0),
        "make no new loan while borrowers read more than this many gigabits of K and V per second here; 0 = no limit",
    ] = 0.0
    lending_place: Annotated[
        str, "place of this engine, such as zone/rack/host, so that the nearest lend first; empty = its host"
    ] = ""
    trace: Annotated[str, "write a Perfetto/Chrome trace of the run to this file, at the end (or set LAMINA_TRACE)"] = (
        ""
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.ray_wait_s < float("inf"):
            raise ValueError(f"--ray-wait-s must be a number of seconds, not {self.ray_wait_s}")
        host, colon, port = self.driver_address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16) or (
            ":" in host and not (host.startswith("[") and host.endswith("]"))
        ):
            raise ValueError(f"--driver must be [NAME@]HOST:PORT, such as 10.0.0.1:7000, not {self.driver_address!r}")
        for name in ("ledger", "lend_address") if self.ledger else ("lend_address",):
            host, _, port = (value := getattr(self, name)).rpartition(":")
            if not host or not port.isascii() or not port.isdigit():
                raise ValueError(f"{flag_name(name)} must be HOST:PORT, such as 10.0.0.1:7100, not {value!r}")
        if (length := len(self.driver_name.encode())) > NAME_BYTES:
            raise ValueError(f"--driver: a name has at most {NAME_BYTES} bytes, not {length}: shorten it")

    @property
    def launcher_name(self) -> str:
        """The launcher that starts the workers, by its name in executor.launchers.LAUNCHERS."""
        return self.launcher if self.launcher != "auto" else "ray" if self.ray_address else "local"

    @property
    def num_spares(self) -> dict[str, int]:
        """Workers of each role that wait to take the place of a lost one."""
        return {"compute": self.spare_compute, "memory": self.spare_memory}

    @property
    def may_span_hosts(self) -> bool:
        """True if workers may be on other hosts."""
        return self.launcher_name != "local"

    @property
    def is_static(self) -> bool:
        """True if people start the workers, each once."""
        return self.launcher_name == "static"

    @property
    def scheme(self) -> str:
        """``transport``, as it is opened: one that reaches other hosts where workers may be there."""
        chosen = self.transport or HERE
        return beyond_host(chosen) if self.may_span_hosts else chosen


class Deadlines(Options, frozen=True, kw_only=True):
    """The longest waits."""

    start_timeout_s: Annotated[float, "seconds for loading, cutting and binding"] = 600.0
    step_timeout_s: Annotated[float, "seconds for one step before a worker counts as hung"] = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("start_timeout_s", "step_timeout_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{flag_name(name)} must be a positive number of seconds, not {getattr(self, name)}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an engine except its model. ``config.make_config`` makes it of flat names."""

    model: ModelOptions = ModelOptions()
    kv: KVOptions = KVOptions()
    batching: BatchingOptions = BatchingOptions()
    topology: TopologyOptions = TopologyOptions()
    devices: DeviceOptions = DeviceOptions()
    launch: LaunchOptions = LaunchOptions()
    deadlines: Deadlines = Deadlines()
    offload: OffloadOptions = OffloadOptions()
    overflow: OverflowOptions = OverflowOptions()

    @property
    def caches_prefixes(self) -> bool:
        """True if the KV of finished requests serves prompts that begin alike."""
        return self.batching.enable_prefix_caching is not False

    @property
    def fetches_stored_kv(self) -> bool:
        """True if prefill workers get K and V of prompts' beginnings from memory workers, which load or move them."""
        return self.topology.prefill_workers > 0 and (bool(self.offload.backend) or self.overflow.truncates_context)

    @property
    def migrates_stripes(self) -> bool:
        """True if stripes may go to another memory worker while their sequence decodes."""
        return self.topology.partition == "spill" and self._copies

    @property
    def migrates_sequences(self) -> bool:
        """True if whole sequences may go from a memory worker that is to go, while all others decode."""
        return self.topology.partition == "request" and self._copies

    @property
    def migrates_kv(self) -> bool:
        """True if either may."""
        return self.migrates_stripes or self.migrates_sequences

    @property
    def _copies(self) -> bool:
        """True if memory workers may copy KV to each other while they serve."""
        plain = not (
            self.offload.backend or self.overflow.truncates_context or self.kv.drops_blocks or self.kv.selects_blocks
        )
        return self.devices.memory_device == "cpu" and plain

    def gpu_index(self, role: str, index: int) -> int:
        """A worker's number among the workers of a host, which take its GPUs in turn: compute workers first, memory
        workers last.
        """
        compute = self.topology.num_compute
        before = {"compute": 0, "prefill": compute}
        elsewhere = self.devices.compute_device == "cpu"
        return index + before.get(role, 0 if elsewhere else compute + self.topology.prefill_workers)
