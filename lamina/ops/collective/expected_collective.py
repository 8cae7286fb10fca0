"""The collective that --collective will give the ranks of a replica, as far as it is known before they start.

In words, without torch and without a look at any device.
"""

from __future__ import annotations

from lamina.config.conflicts import need_text

from . import AUTO

BETWEEN_GPUS = "nccl"
OVER_HOSTS = "mesh"
AS_ASKED = "as asked"
NO_GPU = "not every rank computes on a GPU"
OWN_GPU = "every rank has a GPU of this host to itself"
APART = "ranks are on several hosts, and NCCL does not authenticate them"
OPEN = "what it sends between hosts is neither authenticated nor encrypted"


def expected_collective(asked: str, device: str, *, together: bool) -> str:
    """Return the name and the reason, as ranks report them later. ``device``: as in --compute-device. ``together``: if
    one host has all ranks of the replica.
    """
    if asked != AUTO:
        return f"{asked}: {AS_ASKED}" + ("" if together or asked == OVER_HOSTS else f"; {OPEN}")
    if device == "cpu":
        return f"{OVER_HOSTS}: {NO_GPU}"
    if not together:
        return f"{OVER_HOSTS}: {APART}" if device != AUTO else f"{OVER_HOSTS}: ranks are on several hosts"
    if device == AUTO:
        return f"{BETWEEN_GPUS} where every rank finds a GPU of its own and its torch has NCCL, else {OVER_HOSTS}"
    return f"{BETWEEN_GPUS} where torch has it, else {OVER_HOSTS}: {OWN_GPU}"


def for_gpus() -> str:
    """Return the reason why ranks on CPUs cannot use NCCL, which follows the name of the flag."""
    flag = f"--collective {BETWEEN_GPUS}"
    return need_text(flag, ["--compute-device cuda", "--compute-device auto"]).removeprefix(flag)
