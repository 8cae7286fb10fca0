"""Other engines that decode the model of bench_decode.py, each in an environment and a process of its own.

``DecodePeer`` is the benchmark's side; run as a script it is the other one. ``install.sh`` makes the environments.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peers.child import Child, Fields, serve

ENVIRONMENT = {
    "vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}
GIB = 1 << 30


CHUNK = 512  # of prompts, that every peer reads in a step at least


Step = Callable[[], None]  # decodes one token of every sequence


class PeerRun:
    """Both sides of a peer know this: its settings, the tokens that it has generated, by sequence, and how it differs
    from what was asked for.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = Path(settings["model"])
        self.dtype: str = settings["dtype"]
        self.prompts: list[list[int]] = settings["prompts"]
        rounds = len(self.prompts) * -(-len(self.prompts[0]) // CHUNK)
        self.total: int = settings["tokens"] + rounds  # at most, of each: first ones decode while others are read
        self.threads: int = settings["threads"]
        self.sampling: dict[str, Any] = settings["sampling"]  # temperature (0 = greedy), top_k (0 = all), top_p, min_p
        self.kv_gib: int = 1 + settings["kv_bytes"] // GIB
        self.generated: list[list[int]] = [[] for _ in self.prompts]
        self.form: str = settings.get("form", "")  # of weights: int8 or int4; "" for those of the model
        self.note = ""
        self.begun = 0.0  # when it got the prompts
        self.prompts_s = 0.0  # after which all sequences decode

    def read_all(self, step: Step) -> None:
        """Step until the prompts have been read."""
        while not all(self.generated):
            step()
        self.prompts_s = time.perf_counter() - self.begun


class DecodePeer:
    """A peer that has taken the prompts (lists of as many token ids) and decodes on request.

    Raises OSError or RuntimeError, with the cause, where it cannot take part.
    """

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        """``name``: of PEERS; or with a form of weights, such as openvino:int8."""
        peer, _, form = name.partition(":")
        python, settings = str(folder / peer / "bin" / "python"), {**settings, "form": form}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(settings, file)
            file.flush()
            environment = {"OMP_NUM_THREADS": str(settings["threads"]), **ENVIRONMENT.get(peer, {})}
            self._child = Child(python, __file__, [peer, file.name], None, **environment)

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps."""
        seconds: list[float] = self._child.ask(steps=steps)["seconds"]
        return seconds

    def tokens(self) -> list[list[int]]:
        """Returns the tokens that it has generated, by sequence."""
        tokens: list[list[int]] = self._child.ask(steps=0)["tokens"]
        return tokens

    @property
    def prompts_s(self) -> float:
        """Seconds from its first prompt until all sequences decode."""
        return float(self._child.ask(steps=0)["prompts_s"])

    def note(self) -> str:
        """Returns how it differs from what was asked for; empty if it does not."""
        return str(self._child.ask(steps=0)["note"])

    def close(self) -> None:
        """End the process."""
        self._child.close()


def vllm(run: PeerRun) -> Step:
    """vLLM's engine in this process, compiled by torch.compile, as is its default on CPUs."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(run.kv_gib)
    from vllm import EngineArgs, LLMEngine, SamplingParams  # type: ignore[import-not-found]

    arguments = EngineArgs(
        model=str(run.model),
        dtype=run.dtype,
        skip_tokenizer_init=True,
        max_model_len=len(run.prompts[0]) + run.total + 8,
        max_num_seqs=len(run.prompts),
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_engine_args(arguments)
    params = SamplingParams(max_tokens=run.total, ignore_eos=True, detokenize=False, **run.sampling)
    run.begun = time.perf_counter()
    for i, prompt in enumerate(run.prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def step() -> None:
        for output in engine.step():
            run.generated[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)

    run.read_all(step)
    return step


def openvino(run: PeerRun) -> Step:
    """OpenVINO GenAI's continuous batching; KV in the model's dtype, or in fp32 where this CPU can only do that."""
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    folder = export_openvino(run.model, run.model / f"openvino{run.form}", run.form)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 2 * run.kv_gib, len(run.prompts)
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    wanted = run.sampling
    config = genai.GenerationConfig(max_new_tokens=run.total, ignore_eos=True, do_sample=wanted["temperature"] > 0.0)
    if config.do_sample:
        config.temperature, config.top_p = wanted["temperature"], wanted["top_p"]
        if wanted["top_k"]:
            config.top_k = wanted["top_k"]
        if wanted["min_p"]:
            config.min_p = wanted["min_p"]
    config.set_eos_token_id(0)  # one there must be

    def begin(precision: str) -> tuple[Any, list[Any]]:
        properties = {"KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": run.threads}
        pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        run.begun = time.perf_counter()
        rows = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in run.prompts]
        handles = [pipeline.add_request(i, row, config) for i, row in enumerate(rows)]
        pipeline.step()
        return pipeline, handles

    precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[run.dtype]
    try:
        pipeline, handles = begin(precision)
    except RuntimeError:
        pipeline, handles = begin("f32")
        run.note = "KV in fp32"

    def step() -> None:
        pipeline.step()
        for handle, generated in zip(handles, run.generated, strict=True):
            while handle.can_read():
                generated += next(iter(handle.read().values())).generated_ids

    run.read_all(step)
    return step


def export_openvino(model: Path, folder: Path, form: str = "") -> Path:
    """``folder``, which has the model as OpenVINO reads it: made once. ``form``: int8 by channel, or int4 by 128, the
    head then int8, which are optimum's defaults. Rows become int8, OpenVINO's default.
    """
    if not folder.exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig  # type: ignore[import-not-found]

        how = {"": None, "int8": OVWeightQuantizationConfig(bits=8), "int4": OVWeightQuantizationConfig(bits=4)}[form]
        options = {"load_in_8bit": False} if how is None else {"quantization_config": how}
        OVModelForCausalLM.from_pretrained(model, export=True, **options).save_pretrained(folder)
    return folder


def llama_cpp(run: PeerRun) -> Step:
    """llama.cpp with its KV cache in fp16, which is its default."""
    import llama_cpp as lib  # type: ignore[import-not-found]
    import numpy as np

    file, most = run.model / "model.gguf", 2048
    if not file.exists():
        write_gguf(run.model, file)
    run.note = "KV in fp16"
    lib.llama_backend_init()
    if run.form:  # rows of int8, by 32
        kind = {"int8": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": lib.LLAMA_FTYPE_MOSTLY_Q4_0}[run.form]
        how, whole, file = lib.llama_model_quantize_default_params(), file, file.with_suffix(f".{run.form}.gguf")
        how.ftype, how.nthread = kind, run.threads
        if not file.exists() and lib.llama_model_quantize(str(whole).encode(), str(file).encode(), ctypes.byref(how)):
            raise RuntimeError(f"llama.cpp cannot make {run.form} of {whole}")
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = len(run.prompts) * (-(-(len(run.prompts[0]) + run.total + 8) // 256) * 256)
    params.n_seq_max, params.n_batch = len(run.prompts), most
    params.n_threads = params.n_threads_batch = run.threads
    context = lib.llama_init_from_model(model, params)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(most, 0, 1)

    chain = _llama_chain(lib, run.sampling) if run.sampling["temperature"] else None

    def pick(row: int) -> int:
        if chain is not None:
            return int(lib.llama_sampler_sample(chain, context, row))
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), shape=(vocabulary,)).argmax())

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (sequence, position, token, sampled)."""
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, sampled) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, sampled
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        for i, (sequence, _, _, sampled) in enumerate(rows):
            if sampled:
                run.generated[sequence].append(pick(i))

    run.begun = time.perf_counter()
    for sequence, prompt in enumerate(run.prompts):
        rows = [(sequence, at, token, at + 1 == len(prompt)) for at, token in enumerate(prompt)]
        for start in range(0, len(rows), most):
            decode(rows[start : start + most])
    run.prompts_s = time.perf_counter() - run.begun
    begin = len(run.prompts[0]) - 1
    return lambda: decode([(s, begin + len(done), done[-1], True) for s, done in enumerate(run.generated)])


def _llama_chain(lib: Any, sampling: dict[str, Any]) -> Any:
    """llama.cpp's own samplers, in the order in which vLLM filters."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    parts = [
        lib.llama_sampler_init_temp(sampling["temperature"]),
        lib.llama_sampler_init_min_p(sampling["min_p"], 1) if sampling["min_p"] else None,
        lib.llama_sampler_init_top_k(sampling["top_k"]) if sampling["top_k"] else None,
        lib.llama_sampler_init_top_p(sampling["top_p"], 1) if sampling["top_p"] < 1.0 else None,
        lib.llama_sampler_init_dist(1),
    ]
    for part in filter(None, parts):
        lib.llama_sampler_chain_add(chain, part)
    return chain


def write_gguf(model: Path, file: Path, *, half: bool = False) -> None:
    """The benchmark's Llama as llama.cpp reads it: its names, rotary halves interleaved, words that mean nothing, as
    its server wants some. ``half``: in fp16, which CPUs without AVX512-BF16 multiply faster.
    """
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.MOSTLY_BF16)
    rest = range(256, config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*(f"<0x{byte:02X}>" for byte in range(256)), *(f"w{number}" for number in rest)])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(rest))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, x in load_file(model / "model.safetensors").items():
        for part, count in ("q_proj", heads), ("k_proj", kv_heads):
            if part in name:
                x = x.view(count, 2, -1, x.shape[-1]).transpose(1, 2).reshape(x.shape)
        to = names.get_name(name, try_suffixes=(".weight",))
        if x.dim() == 1 or x.dtype == torch.float32:
            writer.add_tensor(to, x.float().numpy())
        elif half:
            writer.add_tensor(to, x.half().numpy())
        else:
            raw = x.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(to, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PEERS = {"vllm": vllm, "openvino": openvino, "llama.cpp": llama_cpp}


def _begin(peer: str, file: str) -> Callable[[Fields], Fields]:
    run = PeerRun(json.loads(Path(file).read_text()))
    step = PEERS[peer](run)
    run.note = ", ".join(filter(None, (run.note, f"weights in {run.form}, rows in int8" if run.form else "")))

    def reply(question: Fields) -> Fields:
        seconds, before = [], [len(tokens) for tokens in run.generated]
        for _ in range(question["steps"]):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        grown = {len(tokens) - n for tokens, n in zip(run.generated, before, strict=True)}
        if grown != {question["steps"]}:
            raise RuntimeError(f"{peer}: {question['steps']} steps gave sequences {sorted(grown)} tokens")
        told = {"seconds": seconds, "note": run.note, "prompts_s": run.prompts_s}
        return told | {"tokens": [] if question["steps"] else run.generated}

    return reply


if __name__ == "__main__":
    serve(partial(_begin, sys.argv[1], sys.argv[2]))
