"""Flags of vLLM that people paste: by what name the same thing goes here, or what to use where there is none."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

# They do the same thing. A flag takes the place of a flag alone; what follows it stays.
_SAME = {
    "--enforce-eager": "--no-cuda-graphs",
    "--disable-log-requests": "--no-log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    "--enable-log-requests": "--log-requests",
    "-tp": "--tensor-parallel-size",
}
_VALUES = {("--dtype", "half"): "float16", ("--dtype", "float"): "float32"}
# They mean nothing here, and are taken with a line that says so.
_NOTHING = {
    "--enable-server-load-tracking": "GET /load always counts",
    "--enable-chunked-prefill": "prompts are always computed in chunks, of --prefill-chunk tokens",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks, of --prefill-chunk tokens",
    "--disable-uvicorn-access-log": "there is none; --no-log-requests leaves out a line for every request",
}
# They are refused.
_INSTEAD = {
    "--gpu-memory-utilization": "--kv-memory SIZE says what each memory worker keeps for KV",
    "--max-num-batched-tokens": "--prefill-chunk says how many tokens of prompts a step takes",
    "--revision": "give the directory of that revision as MODEL (hf download MODEL --revision REVISION)",
    "--swap-space": "preempted sequences are computed again: leave it out",
    "--max-seq-len-to-capture": "leave it out, or switch graphs off by --no-cuda-graphs",
    "--pipeline-parallel-size": "--pipeline n rotates n batches over n - 1 replicas; layers are not shared out",
}


def translated(args: Sequence[str], known: Collection[str]) -> list[str]:
    """``args`` with flags and values by the names that they have here, less those that mean nothing here, of which a
    line on stderr tells; ``known``: the flags that there are.
    """
    out = list[str]()
    for arg in args:
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and "_" in flag:
            flag = flag.replace("_", "-")
            arg = flag + equals + value
        if flag in _NOTHING and flag not in known:
            print(f"{arg} is left out: {_NOTHING[flag]}", file=sys.stderr)
            continue
        here = _SAME.get(flag, flag)
        if here in known and flag not in known:
            arg = here + equals + value
        if equals and (here, value) in _VALUES:
            arg = f"{here}={_VALUES[here, value]}"
        out.append(_VALUES.get((out[-1] if out else "", arg), arg))
    return out


def instead(flag: str) -> str:
    """What to use where there is no such flag; empty: nobody knows."""
    return _INSTEAD.get(flag, "")
