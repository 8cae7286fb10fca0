"""Other engines that keep KV of earlier prompts: the other side of bench_prefix.py, each in an environment and a
process of its own (install.sh).
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peers.child import Fields, serve
from peers.decode import export_openvino, write_gguf

KV_GIB = 2
CACHE_MIB = 2048  # of llama.cpp's server, in host memory
STARTS_S = 120.0
First = Callable[[list[int], bool], None]  # serves a prompt until its first token; whether its beginning is known


def vllm(path: Path, length: int) -> First:
    """With prefix caching, as it is by default."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=length + 8)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    return lambda prompt, _: llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)


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
            str(export_openvino(path)), scheduler, "CPU", {"KV_CACHE_PRECISION": precision}
        )
        number = 0

        def first(prompt: list[int], _: bool) -> None:
            nonlocal number
            number += 1
            handle = pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            while not handle.can_read():
                pipeline.step()
            handle.read()
            while pipeline.has_non_finished_requests():
                pipeline.step()

        first([5] * 40, False)
        return first

    try:
        return begin("bf16")
    except RuntimeError:
        return begin("f32")


class LlamaServer:
    """llama.cpp's server, which keeps prompts in host memory (--cache-ram) or, if told, a slot in a file."""

    def __init__(self, path: Path, length: int, *, saves: bool) -> None:
        """``saves``: a prompt whose beginning is known has the slot of the first one, restored from its file."""
        file, self._saves, self._saved = path / "model.gguf", saves, False
        if not file.exists():
            write_gguf(path, file)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url, self._folder = f"http://127.0.0.1:{port}", tempfile.mkdtemp()
        program = shutil.which("llama-server", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if program is None:
            raise RuntimeError("there is no llama-server in this environment")
        cache = 0 if saves else CACHE_MIB
        server = subprocess.Popen(
            [program, "--model", str(file), "--port", str(port), "--parallel", "1", "--ctx-size", str(length + 64),
             "--cache-ram", str(cache), "--slot-save-path", self._folder, "--no-webui"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        atexit.register(server.terminate)
        limit = time.monotonic() + STARTS_S
        while not self._is_up():
            if time.monotonic() > limit:
                raise RuntimeError("llama-server does not start")
            time.sleep(0.2)

    def first(self, prompt: list[int], known: bool) -> None:
        """Serve a prompt until its first token."""
        if self._saves and known and self._saved:
            self._post("/slots/0?action=restore", {"filename": "slot"})
        self._post("/completion", {"prompt": prompt, "n_predict": 1, "temperature": 0, "id_slot": 0})
        if self._saves and not self._saved:
            self._post("/slots/0?action=save", {"filename": "slot"})
            self._saved = True

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any]) -> None:
        data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data, head), timeout=60) as answer:
            answer.read()


def llama_ram(path: Path, length: int) -> First:
    """llama.cpp's server with prompts in host memory."""
    return LlamaServer(path, length, saves=False).first


def llama_slots(path: Path, length: int) -> First:
    """llama.cpp's server with a saved slot."""
    return LlamaServer(path, length, saves=True).first


PEERS = {"vllm": vllm, "openvino": openvino, "llama.cpp": llama_ram, "llama.cpp slots": llama_slots}


def _begin(peer: str, path: str, length: str) -> Callable[[Fields], Fields]:
    first = PEERS[peer](Path(path), int(length))

    def answer(fields: Fields) -> Fields:
        start = time.perf_counter()
        first(fields["prompt"], fields["known"])
        return {"seconds": time.perf_counter() - start}

    return answer


if __name__ == "__main__":
    serve(partial(_begin, *sys.argv[1:4]))
