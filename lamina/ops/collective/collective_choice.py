"""Which collective the ranks of a replica take, from what all of them say of where they are."""

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
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host
NETWORK = Path("/proc/self/ns/net")  # processes in one namespace have their interfaces in common
DIGEST = 16  # bytes
_NO_GPU = bytes(DIGEST)


class CollectiveChoice(NamedTuple):
    """``why``: for people."""

    name: str
    why: str
    together: bool  # whether all ranks are on one host


def choose_and_open(asked: str, mesh: MeshCollective, at: RankLocation) -> tuple[Collective, CollectiveChoice]:
    """The collective for --collective ``asked``; all ranks of ``mesh`` call this with the same. Raises ValueError,
    naming the flag, ChannelError.
    """
    choice = choose_collective(asked, gather(mesh, rank_facts(at.device)))
    if choice.name != OVER_HOSTS and not choice.together:
        log.warning(
            "--collective %s: ranks are on several hosts, and %s: keep that network to yourself, or use "
            "--collective %s", choice.name, OPEN, OVER_HOSTS
        )  # fmt: skip
    return open_collective(choice.name, mesh, at._replace(same_process=choice.together)), choice


def choose_collective(asked: str, ranks: Sequence[RankFacts]) -> CollectiveChoice:
    """``ranks``: in their order. Raises ValueError."""
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
    """Of this rank. Where the host does not tell, no other rank is taken to be on it; nor is one in a container with a
    network of its own, whose loopback interface is another one.
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
    """The facts of all ranks, in their order. Raises ChannelError."""
    facts = torch.frombuffer(bytearray(own.host + (own.gpu or _NO_GPU) + bytes([own.usable])), dtype=torch.uint8)
    rows = [bytes(row.tolist()) for row in mesh.all_gather(facts, mesh.size).view(mesh.size, -1)]
    return [
        RankFacts(row[:DIGEST], gpu if (gpu := row[DIGEST : 2 * DIGEST]) != _NO_GPU else b"", row[-1] == 1)
        for row in rows
    ]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()
