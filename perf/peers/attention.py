"""Attention of other projects, each in an environment and a process of its own, for bench_attention.py.

``AttentionPeer`` is the benchmark's side; run as a script it is the other one. Tensors go through files.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from peers.child import Child, Fields, serve

T = TypeVar("T")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def seconds(call: Callable[[], T]) -> tuple[dict[str, float], T]:
    """Returns how long a call takes, and the CPU time of all threads in it; what it returns."""
    start, cpu = time.perf_counter(), time.process_time()
    result = call()
    return {"attention": time.perf_counter() - start, "cpu": time.process_time() - cpu}, result


class AttentionPeer:
    """A peer with its tensors: q [batch, heads, dim], k and v [batch, KV heads, context, dim] of every layer.

    Raises OSError or RuntimeError, with the cause, where the peer cannot take part.
    """

    def __init__(self, python: str, peer: str, settings: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._shape = q.shape
        for name, tensor in {"q": q, "k": k, "v": v}.items():
            tensor.contiguous().view(torch.uint8).numpy().tofile(f"{self._folder.name}/{name}")
        try:
            self._child = Child(python, __file__, [peer, self._folder.name, json.dumps(settings)])
        except (OSError, RuntimeError):
            self._folder.cleanup()
            raise

    def turn(self, layer: int) -> dict[str, float]:
        """One call; see ``seconds``."""
        return self._child.ask(do="turn", layer=layer)

    def result(self) -> Tensor:
        """Returns layer 0, [batch, heads, dim] fp32."""
        self._child.ask(do="result", layer=0)
        return torch.from_file(f"{self._folder.name}/o", size=prod(self._shape)).view(self._shape).clone()

    def close(self) -> None:
        """End the process."""
        self._child.close()
        self._folder.cleanup()


def vllm(settings: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[int], None], Tensor]:
    """vLLM's kernel for CPUs over its paged cache: what computes a layer, and where its result is."""
    import vllm._custom_ops as ops  # type: ignore[import-not-found]
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # type: ignore[import-not-found]

    batch, heads, dim = q.shape
    kv_heads, context, size = k.shape[1], k.shape[2], settings["block_size"]
    isa, pages = _get_attn_isa(q.dtype, size, dim), -(-context // size)
    torch.cpu._init_amx()  # as its workers do, for kernels that need the registers
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    slots = (torch.arange(batch)[:, None] * pages * size + torch.arange(context)).flatten()
    rows = [x.transpose(1, 2).reshape(-1, kv_heads, dim) for x in (k, v)]
    layers = []
    for _ in range(settings["layers"]):
        cache = torch.zeros(batch * pages, kv_heads, 2 * size, dim, dtype=q.dtype).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(*rows, *cache, slots, isa)
        layers.append(cache)
    lengths, starts = torch.full((batch,), context, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)
    sizes = batch, heads, kv_heads, dim, lengths, q.dtype, starts, True, -1, isa, envs.VLLM_CPU_ATTN_SPLIT_KV
    plan, out = ops.cpu_attn_get_scheduler_metadata(*sizes), torch.empty_like(q)

    def attend(layer: int) -> None:
        ops.cpu_attention_with_kv_cache(
            q, *layers[layer], out, starts, lengths, dim**-0.5, True, None, -1, table, 0.0, plan, None
        )

    return attend, out


PEERS = {"vllm": vllm}


def _begin(peer: str, folder: str, settings: dict[str, Any]) -> Callable[[Fields], Fields]:
    attend, out = _open(peer, folder, settings)

    def reply(question: Fields) -> Fields:
        times, _ = seconds(partial(attend, question["layer"]))
        if question["do"] == "result":
            out.float().numpy().tofile(f"{folder}/o")
        return times

    return reply


def _open(peer: str, folder: str, settings: dict[str, Any]) -> tuple[Callable[[int], None], Tensor]:
    torch.set_num_threads(settings["threads"])
    batch, dim, dtype = settings["batch"], settings["head_dim"], DTYPES[settings["dtype"]]
    kv = batch, settings["kv_heads"], settings["context"], dim
    shapes = {"q": (batch, settings["heads"], dim), "k": kv, "v": kv}
    tensors = [torch.from_file(f"{folder}/{n}", size=prod(s), dtype=dtype).view(s) for n, s in shapes.items()]
    return PEERS[peer](settings, *tensors)


if __name__ == "__main__":
    serve(partial(_begin, sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
