"""The choice of the collective of a replica's ranks, by the facts that all of them report."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from . import AUTO, Collective, RankFacts, RankLocation, open_collective, why_unavailable, why_unusable_together
from .expected_collective import APART, AS_ASKED, BETWEEN_GPUS, OPEN, OVER_HOSTS, OWN_GPU
from .mesh import MeshCollective

log = logging.getLogger(__name__)
BOOT = Path("/proc/sys/kernel/random/boot_id")  # equal in all containers of a host
NETWORK = Path("/proc/self/ns/net")  # processes in one namespace share network interfaces
DIGEST = 16  # bytes
_NO_GPU = bytes(DIGEST)


class CollectiveChoice(NamedTuple):
    """A chosen collective. ``why``: the reason, for people."""

    name: str
    why: str
    together: bool  # if all ranks are on one host


def choose_and_open(asked: str, mesh: MeshCollective, at: RankLocation) -> tuple[Collective, CollectiveChoice]:
    """Open the collective for --collective ``asked``, which all ranks of ``mesh`` call with the same arguments. Raises
    ValueError, naming the flag, and ChannelError.
    """
    choice = choose_collective(asked, gather(mesh, rank_facts(at.device)))
    if choice.name != OVER_HOSTS and not choice.together:
        log.warning(
            "--collective %s: ranks are on several hosts, and %s: keep that network to yourself, or use "
            "--collective %s", choice.name, OPEN, OVER_HOSTS
        )  # fmt: skip
    return open_collective(choice.name, mesh, at._replace(same_process=choice.together)), choice


def choose_collective(asked: str, ranks: Sequence[RankFacts]) -> CollectiveChoice:
    """Choose the collective. ``ranks``: in order. Raises ValueError."""
    together = len({r.host for r in ranks}) == 1
    against = why_unusable_together(BETWEEN_GPUS if asked == AUTO else asked, ranks)
    if asked != AUTO:
        if against:
            raise ValueError(
                f"--collective {asked}: {against}: use --collective {OVER_HOSTS}, or a GPU for each of "
                f"--tensor-parallel-size {len(ranks)}"
            )
        return CollectiveChoice(asked, AS_ASKED, together)
    if not against and not together:
        against = APART
    if against:
        return CollectiveChoice(OVER_HOSTS, against, together)
    return CollectiveChoice(BETWEEN_GPUS, OWN_GPU, together)


def rank_facts(device: torch.device) -> RankFacts:
    """Return the facts of this rank. A host that cannot be identified counts as another one for each rank. So does a
    container with its own network, whose loopback interface is another one.
    """
    boot = network = secrets.token_bytes(DIGEST)
    with suppress(OSError):
        boot = BOOT.read_bytes()
        network = boot + bytes(NETWORK.readlink())
    gpu = b""
    if device.type == "cuda":
        gpu = _digest(boot + str(torch.cuda.get_device_properties(device).uuid).encode())
    return RankFacts(_digest(network), gpu, not why_unavailable(BETWEEN_GPUS, device))


def gather(mesh: MeshCollective, own: RankFacts) -> list[RankFacts]:
    """Return the facts of all ranks, in order. Raises ChannelError."""
    facts = torch.frombuffer(bytearray(own.host + (own.gpu or _NO_GPU) + bytes([own.usable])), dtype=torch.uint8)
    rows = [bytes(row.tolist()) for row in mesh.all_gather(facts, mesh.size).view(mesh.size, -1)]
    return [
        RankFacts(row[:DIGEST], gpu if (gpu := row[DIGEST : 2 * DIGEST]) != _NO_GPU else b"", row[-1] == 1)
        for row in rows
    ]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()
