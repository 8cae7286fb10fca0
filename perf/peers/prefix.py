"""Other engines that keep KV of earlier prompts: the other side of bench_prefix.py, each in an environment and a
process of its own (install.sh).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peers.child import Fields, serve
from peers.decode import export_openvino, write_gguf

KV_GIB = 2
SAME = 128  # tokens: prompts that have so many in common begin alike
First = Callable[[list[int]], None]  # serves a prompt until its first token


def vllm(path: Path, length: int) -> First:
    """With prefix caching, as it is by default."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=length + 8)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    return lambda prompt: llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)


def openvino(path: Path, length: int) -> First:
    """OpenVINO GenAI with prefix caching; KV in bf16, or in fp32 where this CPU can only do that."""
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduler, config = genai.SchedulerConfig(), genai.GenerationConfig(max_new_tokens=1, ignore_eos=True)
    scheduler.cache_size, scheduler.max_num_batched_tokens = 2 * KV_GIB, 2048
    scheduler.enable_prefix_caching = True
    config.set_eos_token_id(0)  # one there must be

    def begin(precision: str) -> First:
        pipeline = genai.ContinuousBatchingPipeline(
            str(export_openvino(path, path / "openvino")), scheduler, "CPU", {"KV_CACHE_PRECISION": precision}
        )
        number = 0

        def first(prompt: list[int]) -> None:
            nonlocal number
            number += 1
            handle = pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            while not handle.can_read():
                pipeline.step()
            handle.read()
            while pipeline.has_non_finished_requests():
                pipeline.step()

        first([5] * 40)
        return first

    try:
        return begin("bf16")
    except RuntimeError:
        return begin("f32")


def llama_cpp(path: Path, length: int, slots: tempfile.TemporaryDirectory[str] | None = None) -> First:
    """llama.cpp's own server with one slot; what another prompt drives out of that goes to its memory (--cache-ram).
    xllamacpp brings it compiled, for any CPU with AVX2, so without AVX-512. ``slots``: for saved slots, in place of
    that memory; it goes with what is returned.
    """
    import xllamacpp  # type: ignore[import-not-found]

    file, params = path / "half.gguf", xllamacpp.CommonParams()
    if not file.exists():
        write_gguf(path, file, half=True)
    params.model.path, params.n_ctx, params.n_parallel = str(file), length + 8, 1
    params.cache_ram_mib, params.slot_save_path = (0, f"{slots.name}/") if slots else (KV_GIB << 10, "")
    for cpus in (params.cpuparams, params.cpuparams_batch):
        cpus.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(params)
    asked = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}
    known = list[int]()  # the prompt of the saved slot

    def first(prompt: list[int]) -> None:
        restored = slots and known[:SAME] == prompt[:SAME]
        if restored:
            _slot(server.listening_address, "restore")
        answer = server.handle_completions({"prompt": prompt, **asked})
        if answer["usage"]["completion_tokens"] != 1:
            raise RuntimeError(f"llama.cpp's server: {answer}")
        if restored and answer["timings"]["prompt_n"] > len(prompt) - SAME:
            raise RuntimeError(f"llama.cpp's server has used nothing of the restored slot: {answer['timings']}")
        if slots and not known:
            _slot(server.listening_address, "save")
            known.extend(prompt)

    return first


def _slot(address: str, action: str) -> None:
    """Save or restore the only slot."""
    headers, body = {"Content-Type": "application/json"}, json.dumps({"filename": "known"}).encode()
    asked = urllib.request.Request(f"{address}/slots/0?action={action}", body, headers)
    with urllib.request.urlopen(asked, timeout=60.0) as answer:
        answer.read()


def llama_cpp_slots(path: Path, length: int) -> First:
    """The same, which saves the slot of its first prompt to a file, and restores it before each prompt that begins
    alike.
    """
    return llama_cpp(path, length, tempfile.TemporaryDirectory())


PEERS = {"vllm": vllm, "openvino": openvino, "llama.cpp-server": llama_cpp, "llama.cpp-slots": llama_cpp_slots}
HOMES = {"llama.cpp-slots": "llama.cpp-server"}  # the environment of a peer, where another one has it


def _begin(peer: str, path: str, length: str) -> Callable[[Fields], Fields]:
    first = PEERS[peer](Path(path), int(length))

    def answer(fields: Fields) -> Fields:
        start = time.perf_counter()
        first(fields["prompt"])
        return {"seconds": time.perf_counter() - start}

    return answer


if __name__ == "__main__":
    serve(partial(_begin, *sys.argv[1:4]))
