"""The engine's configuration: frozen, keyword-only, checked where it is made. Command-line flags come from here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from lamina.cores import AUTO, parse_cores
from lamina.netstack import HERE, beyond_host
from lamina.protocol.partition import PARTITIONS

_T = TypeVar("_T")
CHUNK_TOKENS = 128  # of attention.merge, which this module does not import for torch's sake
_ACCEPTED = {
    "int": ("int",),
    "int | str": ("int", "str"),
    "float": ("float", "int"),
    "str": ("str",),
    "bool": ("bool",),
}
MEASURED = "measured"
MOST_THREADS = 1024
MOST_WORKERS = 1024
PLACEMENTS = ("pack", "spread")
DTYPES = ("auto", "float32", "bfloat16", "float16")
COLLECTIVES = ("auto", "mesh", "gloo", "nccl")  # of collective, which is a room above
KV_CACHE_DTYPES = ("auto", "int8", "fp8")  # of kv.stored, which imports torch


def option(default: Any, help: str) -> Any:
    """A field with the text that ``lamina-launch`` prints for its flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything about an engine except its model. Flags of ``lamina-launch`` have the same names with dashes."""

    memory_workers: int = option(2, "memory workers, which share the KV cache and the attention over it")
    memory_weights: str = option(
        "",
        "each memory worker's part of the work, such as 0.7,0.3; measured = by how fast each reads its memory at the "
        "start; empty = equal parts",
    )
    partition: str = option(
        "head",
        "what memory workers share: KV heads (head; the tokens of a head where heads do not divide), tokens of every "
        "sequence (token), or whole sequences (request)",
    )
    transport: str = option(
        "",
        "how the pools talk: shm, tcp, loopback (everything in one process), auto, cuda, verbs, mlx5; empty = shm, or "
        "loopback where all workers compute on one GPU, or auto over Ray",
    )
    memory_addresses: str = option("", "where memory workers listen, one each, by comma; empty = any free place")
    ray_address: str = option(
        "",
        "start workers through Ray: auto (this host's cluster), HOST:PORT, or the YAML of `lamina-launch cluster`; "
        "empty = on this machine",
    )
    placement: str = option("pack", "over Ray: workers on few hosts, near each other (pack), or on many (spread)")
    compute_on: str = option(
        "lamina_compute", "over Ray: what a host of compute workers has, a resource, a type of GPU, or LABEL=VALUE"
    )
    memory_on: str = option("lamina_memory", "over Ray: the same for memory workers")
    dtype: str = option("auto", "of weights, KV cache and wire: auto (as stored), float32, bfloat16, float16")
    kv_cache_dtype: str = option(
        "auto", "of stored K and V: auto (as --dtype), or 8 bits with a scale for each token and head: int8, fp8 (E4M3)"
    )
    max_model_len: int = option(0, "tokens of a sequence, prompt included; 0 = the model's own limit")
    block_size: int = option(32, "tokens in a KV block")
    kv_memory: str = option("auto", "memory for KV blocks on each memory worker, such as 512MiB or 4GiB")
    max_num_seqs: int = option(64, "sequences that decode at once")
    prefill_chunk: int = option(512, "prompt tokens in a step at most; other requests decode between chunks")
    pipeline: int | str = option(
        1,
        "batches that take turns: while one is attended, others are in the slices; n > 2 rotate over n - 1 replicas; "
        "auto = what is fastest here, found by trying",
    )
    tensor_parallel_size: int = option(
        1, "compute workers that share the weights of a replica, a part each; must divide the memory workers"
    )
    collective: str = option(
        "auto",
        "how these ranks sum what each has: mesh (by way of the hosts, over --transport), gloo (so too, over its own "
        "TCP), nccl (from GPU to GPU), or auto (nccl where each rank has a GPU of one host to itself, else mesh)",
    )
    compute_workers: int = option(1, "replicas for --pipeline auto, which then goes up to one batch more")
    prefill_workers: int = option(
        0, "workers of their own for prompts, which then do not slow decoding; 0 = the compute workers do them"
    )
    overlap: bool = option(True, "memory workers attend stored tokens on Q alone, while K and V are still projected")
    deterministic: bool = option(
        False,
        "fixed shapes and cuts: results do not depend on batch mates (but for rounding after a preemption); slower",
    )
    attention: str = option(
        "auto", "attention of the memory workers: native, numba, reference, or auto (the first that works)"
    )
    gemm: str = option("auto", "linear layers of the compute worker: native, torch, or auto (the first that works)")
    compile: bool = option(
        False, "compile what lies between messages: decodes faster, starts later; needs a C++ compiler; on CPUs"
    )
    compute_device: str = option(
        "cpu",
        "what compute and prefill workers compute on: cpu; cuda (a GPU for each, in turn); cuda:N; or auto (cuda where "
        "torch has it). Not auto by default while GPUs are not yet measured",
    )
    memory_device: str = option("cpu", "the same for memory workers, whose KV cache is in its memory then")
    memory_sms: int = option(
        0, "multiprocessors of its GPU that a memory worker may use, so that compute workers have the others; 0 = all"
    )
    cuda_graphs: bool = option(True, "on GPUs, slices of up to 256 rows run as CUDA graphs")
    compute_threads: int = option(0, "threads of the compute worker; 0 = all cores")
    memory_threads: int = option(0, "threads of each memory worker; 0 = an equal share of the cores")
    cores: str = option(
        "",
        "cores of each worker (compute workers, then memory workers, then prefill workers), such as 0-3/4,5/6,7; "
        "auto = cores of their own where they work at once; empty = the system places them",
    )
    seed: int = option(0, "where requests without a seed get theirs from")
    trace: str = option("", "write a Perfetto/Chrome trace of the run to this file, at the end (or set LAMINA_TRACE)")
    trust_remote_code: bool = option(False, "run Python code that ships with the model")
    start_timeout_s: float = option(600.0, "seconds for loading, cutting and binding")
    step_timeout_s: float = option(60.0, "seconds for one step before a worker counts as hung")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value).__name__ not in _ACCEPTED[str(f.type)]:
                raise ValueError(f"{flag(f.name)} must be of type {f.type}, not {value!r}")
        for name, low in (
            ("memory_workers", 1), ("compute_workers", 1), ("tensor_parallel_size", 1),
            ("max_num_seqs", 1), ("prefill_chunk", 1), ("block_size", 1),
            ("prefill_workers", 0), ("max_model_len", 0), ("memory_sms", 0),
            ("compute_threads", 0), ("memory_threads", 0), ("seed", 0),
        ):  # fmt: skip
            if getattr(self, name) < low:
                raise ValueError(f"{flag(name)} must be at least {low}, not {getattr(self, name)}")
        for name, most in (
            ("memory_workers", MOST_WORKERS), ("compute_workers", MOST_WORKERS), ("prefill_workers", MOST_WORKERS),
            ("compute_threads", MOST_THREADS), ("memory_threads", MOST_THREADS),
        ):  # fmt: skip
            if getattr(self, name) > most:
                raise ValueError(f"{flag(name)} must be at most {most}, not {getattr(self, name)}")
        for name in ("start_timeout_s", "step_timeout_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{flag(name)} must be a positive number of seconds, not {getattr(self, name)}")
        if self.cores not in ("", AUTO):
            parse_cores(self.cores)
        self._check_pipeline()
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        check_kv_cache_dtype(self.kv_cache_dtype)
        if CHUNK_TOKENS % self.block_size:
            raise ValueError(f"--block-size must divide {CHUNK_TOKENS}, not {self.block_size}: use 16, 32 or 64")
        if self.memory_addresses and len(self.addresses) != self.memory_workers:
            raise ValueError(
                f"--memory-addresses names {len(self.addresses)} places for --memory-workers {self.memory_workers}"
            )
        fixed = [a for a in self.addresses if a and not a.endswith(":0")]  # port 0 is any free one
        if twice := next((a for a in fixed if fixed.count(a) > 1), None):
            raise ValueError(f"--memory-addresses names {twice} twice: each memory worker needs a place of its own")
        self._check_cluster()
        if self.partition not in PARTITIONS:
            raise ValueError(f"--partition must be one of {', '.join(PARTITIONS)}, not {self.partition!r}")
        if len(self.weights) != self.memory_workers:
            raise ValueError(
                f"--memory-weights names {len(self.weights)} weights for --memory-workers {self.memory_workers}"
            )
        self._check_ranks()
        self._check_devices()
        self.kv_bytes()

    @property
    def weights(self) -> list[float]:
        """Each memory worker's part of the work, in any unit; equal ones where they are to be measured."""
        if self.memory_weights in ("", MEASURED):
            return [1.0] * self.memory_workers
        return [_weight(text) for text in self.memory_weights.split(",")]

    @property
    def addresses(self) -> list[str]:
        """Where each memory worker listens; "" = any free place."""
        return self.memory_addresses.split(",") if self.memory_addresses else [""] * self.memory_workers

    @property
    def most_batches(self) -> int:
        """That take turns, at most."""
        return self.pipeline if isinstance(self.pipeline, int) else self.compute_workers + 1

    @property
    def replicas(self) -> int:
        """Copies of the weights, each on ``tensor_parallel_size`` compute workers."""
        return max(1, self.most_batches - 1)

    @property
    def at_once(self) -> bool:
        """Whether both pools work at the same time, and not in turns."""
        return self.most_batches > 1 or self.prefill_workers > 0

    @property
    def num_compute(self) -> int:
        """Compute workers: of every replica, one for each rank."""
        return self.replicas * self.tensor_parallel_size

    @property
    def max_rows(self) -> int:
        """Rows of a step at most: every sequence decodes one token, beside one prefill chunk."""
        return self.max_num_seqs + self.prefill_chunk

    @property
    def launcher(self) -> str:
        """Who starts the workers, by its name in fleet.launcher.LAUNCHERS."""
        return "ray" if self.ray_address else "local"

    @property
    def scheme(self) -> str:
        """``transport``, as it is opened: one that reaches other hosts where workers may be there."""
        chosen = self.transport or HERE
        return beyond_host(chosen) if self.ray_address else chosen

    def _check_cluster(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"--placement must be one of {', '.join(PLACEMENTS)}, not {self.placement!r}")
        if not self.ray_address:
            return
        try:
            beyond_host(self.transport)
        except ValueError as error:
            raise ValueError(f"--transport: {error}") from None
        if self.memory_addresses:
            raise ValueError("--memory-addresses are for this machine: over --ray-address hosts have theirs from Ray")
        if self.cores:
            raise ValueError("--cores are of this machine: over --ray-address Ray gives workers theirs")

    def gpu_number(self, role: str, index: int) -> int:
        """Of a worker, among those of a host that take its GPUs in turn: compute workers first, memory workers last."""
        before = {"compute": 0, "prefill": self.num_compute}
        elsewhere = self.compute_device == "cpu"
        return index + before.get(role, 0 if elsewhere else self.num_compute + self.prefill_workers)

    def _check_devices(self) -> None:
        for name in ("compute_device", "memory_device"):
            if not re.fullmatch(r"cpu|auto|cuda(:\d{1,4})?", getattr(self, name)):
                raise ValueError(f"{flag(name)} must be cpu, cuda, cuda:N or auto, not {getattr(self, name)!r}")
        if ":" in self.compute_device and self.tensor_parallel_size > 1:
            raise ValueError(
                f"--compute-device {self.compute_device} is one GPU, and --tensor-parallel-size "
                f"{self.tensor_parallel_size} takes one for each rank: use --compute-device cuda"
            )
        if self.memory_sms and self.memory_device == "cpu":
            raise ValueError(
                f"--memory-sms {self.memory_sms} is for memory workers on a GPU: leave it out with --memory-device cpu"
            )
        if self.compile and self.compute_device != "cpu":
            raise ValueError(f"--compile is for CPUs: leave it out with --compute-device {self.compute_device}")

    def _check_pipeline(self) -> None:
        if self.pipeline != "auto" and (isinstance(self.pipeline, str) or self.pipeline < 1):
            raise ValueError(f"--pipeline must be at least 1, or auto, not {self.pipeline}")
        if self.most_batches > MOST_WORKERS + 1:
            raise ValueError(f"--pipeline must be at most {MOST_WORKERS + 1}, not {self.pipeline}")
        if self.pipeline != "auto" and self.compute_workers not in (1, self.replicas):
            raise ValueError(
                f"--compute-workers {self.compute_workers} is for --pipeline auto; --pipeline {self.pipeline} "
                f"has {self.replicas}"
            )

    def _check_ranks(self) -> None:
        size = self.tensor_parallel_size
        if self.collective not in COLLECTIVES:
            raise ValueError(f"--collective must be one of {', '.join(COLLECTIVES)}, not {self.collective!r}")
        if self.memory_workers % size:
            raise ValueError(
                f"--tensor-parallel-size {size}: each rank has memory workers of its own, as many as the others: "
                f"use --memory-workers {size} or {2 * size}, not {self.memory_workers}"
            )
        if size > 1 and self.prefill_workers:
            raise ValueError("--prefill-workers have all weights: use 0 with --tensor-parallel-size > 1")
        if any(self.of_rank(self.weights, r) != self.of_rank(self.weights, 0) for r in range(size)):
            raise ValueError(
                f"--memory-weights {self.memory_weights}: memory worker w is rank w mod {size}'s "
                f"(--tensor-parallel-size), and every rank must have the same weights in the same order"
            )

    def of_rank(self, each: Sequence[_T], rank: int) -> list[_T]:
        """Of what there is one of for each memory worker, what belongs to those of ``rank``."""
        return list(each[rank :: self.tensor_parallel_size])

    def kv_bytes(self) -> int:
        """``kv_memory`` in bytes; 0 = choose at start. Raises ValueError on anything else than a size."""
        return 0 if self.kv_memory == "auto" else parse_size(self.kv_memory, "--kv-memory")


def _weight(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(
        f"--memory-weights must be positive numbers by comma, such as 0.7,0.3, or measured, not {text.strip()!r}"
    )


def weights_of(rates: list[float]) -> list[float]:
    """Parts of the work for memory workers that read so many bytes a second: of the fastest one's, in tenths.

    Workers that differ by less than that are alike: rates that are measured never agree exactly, and equal parts are
    the better ones where heads are shared.
    """
    return [max(0.1, round(rate / max(rates), 1)) for rate in rates]


def check_kv_cache_dtype(name: str) -> None:
    """Raises ValueError, with the known ones, for a --kv-cache-dtype that is none."""
    if name not in KV_CACHE_DTYPES:
        raise ValueError(f"--kv-cache-dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {name!r}")


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def parse_size(text: str | int, name: str) -> int:
    """Bytes of "4GiB", "512MB", "1048576". Raises ValueError that names ``name``."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in units or float(match[1]) <= 0:
        raise ValueError(f"{name} must be a size such as 512MiB or 4GiB, not {text!r}")
    return int(float(match[1]) * units[match[2].upper()])


def make_config(options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig of keyword options. Raises ValueError on an unknown name, with the known ones."""
    known = [f.name for f in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"unknown option {unknown[0]!r}; {hint}")
    return EngineConfig(**{name: _plain(name, value) for name, value in options.items()})


def _plain(name: str, value: Any) -> Any:
    """What Python users write for an option, in the form that it has here: torch.float32, a size as a number, lists."""
    if name == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if name == "kv_memory" and type(value) is int else value
