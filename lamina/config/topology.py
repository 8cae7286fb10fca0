"""The numbers of workers of each kind, and the division of work among them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, TypeVar

from msgspec import Meta

from .flag_groups import flag_name
from .option import MEASURED, Choices, Options, ParsedBy, parse_size, parse_weights
from .partition import PARTITIONS

_T = TypeVar("_T")
MAX_WORKERS = 1024
MAX_BATCHES = MAX_WORKERS + 1
COLLECTIVES = ("auto", "mesh", "nccl")  # of collective, which is a room above


class TopologyOptions(Options, frozen=True, kw_only=True):
    """The numbers of workers of each kind, and the division of work among them."""

    memory_workers: Annotated[
        int, Meta(ge=1, le=MAX_WORKERS), "number of memory workers, which divide the KV cache and the attention over it"
    ] = 2
    memory_weights: Annotated[
        tuple[float, ...] | str,
        ParsedBy(parse_weights),
        "each memory worker's part of the KV cache, such as 0.7,0.3. measured = in proportion to how fast each "
        "reads its memory, at the start and while a server runs; empty = equal parts",
    ] = ()
    partition: Annotated[
        str,
        Choices(tuple(PARTITIONS)),
        "how memory workers divide the KV cache. head: by KV heads, and by tokens of a head if the heads do not "
        "divide evenly. token: by tokens of every sequence. request: by whole sequences. spill: by whole sequences, "
        "except parts that do not fit",
    ] = "head"
    kv_parity: Annotated[
        int,
        Meta(ge=0, le=1),
        "1 = one more memory worker for each rank keeps the XOR of all others' K and V. The KV of a lost worker is "
        "then rebuilt over --transport, not recomputed; 0 = none",
    ] = 0
    pipeline: Annotated[
        int | str,
        "batches that take turns: while memory workers attend for one, compute workers run slices of others; n > 2 "
        "batches rotate over n - 1 replicas",
    ] = 1
    plan: Annotated[
        str,
        "auto:n = measure slices, attention and messages at the start, and choose up to n batches on n - 1 "
        "replicas, with --memory-weights measured. auto = auto:2; empty = as `pipeline` says",
    ] = ""
    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1),
        "ranks: compute workers that divide the weights of a replica; must divide --memory-workers",
    ] = 1
    collective: Annotated[
        str,
        Choices(COLLECTIVES),
        "how ranks add up their results. mesh: through host memory, over --transport. nccl: from GPU to GPU. auto: "
        "nccl if each rank has a GPU of one host to itself, else mesh",
    ] = "auto"
    prefill_workers: Annotated[
        int,
        Meta(ge=0, le=MAX_WORKERS),
        "workers that only compute prompts, so that prompts do not slow decoding; 0 = compute workers compute prompts",
    ] = 0
    prefill_pipeline: Annotated[
        int,
        Meta(ge=1, le=MAX_WORKERS),
        "prefill workers that compute a prompt together: each has some consecutive layers, and chunks go from one "
        "to the next; must divide --prefill-workers",
    ] = 1
    borrow: Annotated[
        str,
        "the most KV memory to borrow from other deployments when there is too little here, such as 8GiB, with "
        "--partition spill",
    ] = ""
    lend: Annotated[
        float,
        Meta(ge=0.0, le=0.9),
        "the part of --kv-cache-memory-bytes that other deployments may borrow while it is not needed here, such as "
        "0.25, with --partition spill",
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.borrow_bytes  # noqa: B018 - or it raises
        if self.memory_weights != MEASURED:
            parse_weights(self.memory_weights)
        if isinstance(self.pipeline, str):
            more = f", as is plan={self.pipeline!r}, which measures it" if re.match("auto", self.pipeline) else ""
            raise ValueError(f"--pipeline must be a number of batches, not {self.pipeline}{more}")
        if self.pipeline < 1:
            raise ValueError(f"--pipeline must be at least 1, not {self.pipeline}")
        if self.plan and not re.fullmatch(r"auto(:[1-9][0-9]*)?", self.plan):
            raise ValueError(f"--pipeline must be a number, auto, or auto:n for up to n batches, not {self.plan}")
        if self.max_batches > MAX_BATCHES:
            name = "--pipeline auto:n" if self.plan else "--pipeline"
            raise ValueError(f"{name} must be at most {MAX_BATCHES}, not {self.max_batches}")

    @property
    def borrow_bytes(self) -> int:
        """``borrow`` in bytes. Raises ValueError on anything else than a size."""
        return parse_size(self.borrow, flag_name("borrow")) if self.borrow else 0

    @property
    def may_borrow(self) -> bool:
        """True if memory workers on loan may come, of other deployments or of what this one lends them."""
        return bool(self.borrow) or self.lend > 0.0

    @property
    def loan_flag(self) -> str:
        """The option by which they may."""
        return flag_name("borrow" if self.borrow else "lend")

    def lent_bytes(self, kv_bytes: int) -> int:
        """Return the bytes that all memory workers keep outside of the pool, for others. ``kv_bytes``: of each."""
        return self.memory_workers * int(self.lend * kv_bytes)

    def pool_bytes(self, kv_bytes: int) -> int:
        """Return a memory worker's part of the pool, of its ``kv_bytes``."""
        return kv_bytes - int(self.lend * kv_bytes)

    def extra_kv_bytes(self, kv_bytes: int) -> int:
        """Return the bytes that may join a rank's pool: of others, or lent ones that return. ``kv_bytes``: of each
        memory worker.
        """
        return (self.borrow_bytes + self.lent_bytes(kv_bytes)) // self.tensor_parallel_size

    @property
    def measures_pipeline(self) -> bool:
        """True if the number of batches and the parts of the work are measured."""
        return bool(self.plan)

    @property
    def measures_weights(self) -> bool:
        """True if the memory workers' parts of the work are measured. With parity they are equal."""
        several = self.memory_workers > self.tensor_parallel_size and not self.kv_parity
        return self.memory_weights == MEASURED or (self.measures_pipeline and several and not self.memory_weights)

    @property
    def max_batches(self) -> int:
        """The most batches that take turns."""
        return int(self.plan.partition(":")[2] or 2) if self.plan else int(self.pipeline)

    @property
    def replicas(self) -> int:
        """Copies of the weights, each on ``tensor_parallel_size`` compute workers."""
        return max(1, self.max_batches - 1)

    @property
    def overlaps_pools(self) -> bool:
        """True if both pools work at the same time, and not in turns."""
        return self.max_batches > 1 or self.prefill_workers > 0

    @property
    def prefill_groups(self) -> int:
        """The number of prompts that are computed at a time: each by ``prefill_pipeline`` prefill workers."""
        return self.prefill_workers // self.prefill_pipeline

    @property
    def num_compute(self) -> int:
        """Compute workers: of every replica, one for each rank."""
        return self.replicas * self.tensor_parallel_size

    @property
    def num_parity(self) -> int:
        """Memory workers that keep the parity of others: one for each rank, and after all others."""
        return self.kv_parity * self.tensor_parallel_size

    @property
    def num_workers(self) -> dict[str, int]:
        """Role -> its workers."""
        memory = self.memory_workers + self.num_parity
        return {"memory": memory, "compute": self.num_compute, "prefill": self.prefill_workers}

    @property
    def normalized_weights(self) -> list[float]:
        """Each memory worker's part of the work, in any unit; equal ones where they are to be measured."""
        if isinstance(self.memory_weights, str) or not self.memory_weights:
            return [1.0] * self.memory_workers
        return list(self.memory_weights)

    def of_rank(self, each: Sequence[_T], rank: int) -> list[_T]:
        """Return the entries of ``rank``'s memory workers; ``each`` has an entry for each memory worker."""
        return list(each[rank :: self.tensor_parallel_size])
