"""The memory of workers: sums, the check that they fit a host, and a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .report import size_text, table

HOST = "cpu"
_FIXES = {
    "weights": "use --dtype bfloat16, or fewer copies: --pipeline N takes N - 1, --prefill-workers one each",
    "KV blocks": "lower --kv-cache-memory-bytes",
    "slots": "lower --prefill-chunk or --max-num-seqs",
    "workspace": "lower --prefill-chunk or --max-num-seqs",
    "runtime": "use fewer --memory-workers or --prefill-workers",
}


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The most bytes that one worker uses, once all of it is in use. Sums are the resident memory of its process.

    mapped: weights in the pages of their files, which workers of one host share; copied: weights of its own.
    ``memory_share``: identifies the mapped weights; workers with an equal value share pages. kv: KV blocks. slots: of
    its channels, both directions. workspace: tensors that live during a step. private, libraries: its programs, and the
    pages of their files. ``device``: of weights, KV blocks and workspace. ``tokens``: of one sequence that its KV
    blocks hold in whole stripes, if memory workers lend them.
    """

    name: str
    device: str = HOST
    memory_share: int = 0
    mapped: int = 0
    copied: int = 0
    kv: int = 0
    tokens: int = 0
    slots: int = 0
    workspace: int = 0
    private: int = 0
    libraries: int = 0

    @property
    def columns(self) -> dict[str, int]:
        """The bytes by purpose."""
        return {
            "weights": self.mapped + self.copied,
            "KV blocks": self.kv,
            "slots": self.slots,
            "workspace": self.workspace,
            "runtime": self.private + self.libraries,
        }

    @property
    def resident_bytes(self) -> int:
        """The resident bytes of the process, shared pages included."""
        return sum(self.columns.values())

    @property
    def private_bytes(self) -> int:
        """The process's bytes on the host that no other process shares."""
        on_device = self.copied + self.kv + self.workspace if self.device == HOST else 0
        return on_device + self.slots + self.private


def host_bytes(workers: Sequence[WorkerMemory]) -> int:
    """Return the memory of the host that all workers take together. Files that several have mapped count once. Slots
    count at both ends, as over TCP.
    """
    parts: dict[int, int] = {}
    for w in workers:
        parts[w.memory_share] = max(parts.get(w.memory_share, 0), w.mapped)
    libraries = max((w.libraries for w in workers), default=0)
    return sum(w.private_bytes for w in workers) + sum(parts.values()) + libraries


def check_fits(workers: Sequence[WorkerMemory], free: int) -> None:
    """Raise ValueError if the host has less than the workers take, with the largest part and how to reduce it."""
    needed = host_bytes(workers)
    if needed <= free:
        return
    sums = _sums(workers)
    most = max(sums, key=lambda name: sums[name])
    raise ValueError(
        f"the workers take {size_text(needed)} of memory, {size_text(free)} are free here; {size_text(sums[most])} "
        f"are {most}: "
        f"{_FIXES[most]}"
    )


def memory_text(workers: Sequence[WorkerMemory], free: int) -> str:
    """Return a line for each worker, and the memory that they take of the host."""
    names = list(WorkerMemory(name="").columns)
    head = ["memory", "device", *names, "total"]
    rows = [[w.name, w.device, *(_cell(n) for n in w.columns.values()), size_text(w.resident_bytes)] for w in workers]
    taken = f"  of {size_text(free)} that are free here, {size_text(host_bytes(workers))} would be taken"
    return "\n".join([*table([head, *rows], left=(0, 1)), taken])


def _sums(workers: Iterable[WorkerMemory]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for w in workers:
        for name, nbytes in w.columns.items():
            sums[name] = sums.get(name, 0) + nbytes
    return sums


def _cell(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "-"
