"""Flags of vLLM's server that people paste, and forms of others: by what name the same thing goes here. Those of its
engine are options, too (``lamina.api.vllm_compat``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from lamina.observe.log_lines import say

# They do the same thing. A flag takes the place of a flag alone; what follows it stays.
_SAME = {
    "--disable-log-requests": "--no-enable-log-requests",
    "-tp": "--tensor-parallel-size",
}
_VALUES = {("--dtype", "half"): "float16", ("--dtype", "float"): "float32"}
_LISTS = frozenset({"--served-model-name"})  # separate values there, one value with commas here
# They mean nothing here, and are taken with a line that says so.
_NOTHING = {
    "--enable-server-load-tracking": "GET /load always counts",
    "--disable-uvicorn-access-log": "there is none; --no-enable-log-requests leaves out a line for every request",
}

# Flags of vLLM, llama.cpp, TGI and Ollama -> the flag here, or what to do.
WORDS = {
    **dict.fromkeys(("--model", "--model-id", "-m"), "the model is an argument without a flag"),
    **dict.fromkeys(
        ("--ctx-size", "-c", "--num-ctx", "--max-total-tokens", "--max-input-length", "--max-input-tokens"),
        "--max-model-len",
    ),
    **dict.fromkeys(
        ("--n-predict", "-n", "--num-predict"), "a request's max_tokens says that, or --max-tokens of generate"
    ),
    **dict.fromkeys(("--parallel", "-np", "--max-concurrent-requests", "--max-batch-size"), "--max-num-seqs"),
    "--max-batch-prefill-tokens": "--prefill-chunk",
    **dict.fromkeys(("--cache-type-k", "--cache-type-v"), "--kv-cache-dtype"),
    "--alias": "--served-model-name",
    "--hostname": "--host",
    "--num-shard": "--tensor-parallel-size",
    "--chat-template-file": "--chat-template",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--cors-allow-origin": "--allowed-origins",
    "--api-prefix": "--root-path",
    "--metrics": "GET /metrics is always there",
}


def translated(args: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns ``args`` with vLLM's flags and values replaced by Lamina's. ``known``: Lamina's flags.

    Flags without a meaning here are left out, with a line on stderr for each.
    """
    out, model_first = list[str](), bool(args) and not args[0].startswith("-")  # else one value may be the MODEL
    for arg in args:
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and "_" in flag:
            flag = flag.replace("_", "-")
            arg = flag + equals + value
        if flag in _NOTHING and flag not in known:
            say(f"{arg} is ignored: {_NOTHING[flag]}", logging.WARNING)
            continue
        if out[-2:-1] and out[-2] in _LISTS & {*known} and model_first and not arg.startswith("-"):
            out[-1] += f",{arg}"
            continue
        here = _SAME.get(flag, flag)
        if here in known and flag not in known:
            arg = here + equals + value
        if equals and (here, value) in _VALUES:
            arg = f"{here}={_VALUES[here, value]}"
        out.append(_VALUES.get((out[-1] if out else "", arg), arg))
    return out
