"""Decoding with the compute worker on a GPU, next to transformers on the same GPU: the end-to-end part of gpu_suite.py.

Tokens of the shipped model are compared with those of transformers. A Llama shape with random weights is timed. Lamina
has memory workers on the host's cores and on the same GPU, there in processes of their own and in one process. Hosts
send messages, or kernels do. transformers is not split and has a static cache, compiled and not. Some KV caches are
larger than the part of the GPU that all may take. Lamina with its KV cache in the host's memory is then compared with
transformers with its offloaded one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference_model import made

from lamina import LLM, SamplingParams

SHIPPED = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"
LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}
LEAST_EQUAL = 0.95  # of the shipped model's tokens in fp32; a near tie may change the rest of a text

Result = dict[str, Any]


@dataclass(frozen=True)
class GpuSettings:
    """The measurements to make.

    ``batches``: (sequences, tokens of each prompt); ``limit_s``: nothing is begun after it.
    """

    device: str = "cuda"
    shape: tuple[tuple[str, int], ...] = tuple(LLAMA_1B.items())
    dtype: str = "bfloat16"
    batches: tuple[tuple[int, int], ...] = ((1, 2048), (32, 2048), (128, 2048))
    beyond: tuple[tuple[int, int], ...] = ((256, 2048),)  # whose KV cache is larger than the budget
    budget_gb: float = 12.0  # of the device, with weights of 2.5 GB and what a step computes in
    tokens: int = 48
    early: int = 1024  # tokens that the first ones may draw while the last prompts are read
    texts: int = 4
    memory_workers: int = 2
    limit_s: float = 50.0


def settings(dry: bool) -> GpuSettings:
    """Returns what gpu_suite.py measures. ``dry``: on a CPU, with a model of few weights."""
    if not dry:
        return GpuSettings()
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 128, "vocab_size": 300}
    return GpuSettings(
        device="cpu", shape=tuple(shape.items()), dtype="float32", batches=((2, 16),), beyond=((3, 16),), tokens=6,
        early=60, texts=2, memory_workers=1,
    )  # fmt: skip


def tokens_as_transformers(settings: GpuSettings) -> Result:
    """The part of the shipped model's greedy tokens that are those of transformers on the same device, in fp32."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 200, (5 + 40 * i,), generator=generator).tolist() for i in range(settings.texts)]
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).to(settings.device)
    wanted = [_generate(model, [p], settings.tokens, settings.device)[0] for p in prompts]
    del model
    shares = Result()
    for name, options in _places(settings.device).items():
        try:
            with LLM(str(SHIPPED), memory_workers=settings.memory_workers, dtype="float32", **options) as llm:
                outputs = llm.generate(prompts, _greedy(settings.tokens))
        except (RuntimeError, ValueError) as error:
            shares[name] = str(error)
            continue
        same = [prefix_length(o.outputs[0].token_ids, w) for o, w in zip(outputs, wanted, strict=True)]
        shares[name] = sum(same) / sum(map(len, wanted))
    return shares


def _places(device: str) -> dict[str, dict[str, Any]]:
    """Returns the placements; messages that kernels send come last, in one process and in several, which shows that
    they are right, not fast.
    """
    places: dict[str, dict[str, Any]] = {
        f"memory on {m}": {"compute_device": device, "memory_device": m, "transport": "shm"}
        for m in dict.fromkeys(("cpu", device))
    }
    if device != "cpu":
        for name, transport in (("one process", "loopback"), ("processes", "cuda")):
            by_kernels = places[f"memory on {device}"] | {"transport": transport, "step_timeout_s": 20.0}
            places[f"memory on {device}, {name}, messages by kernels"] = by_kernels
    return places


def speed(settings: GpuSettings) -> Result:
    """Tokens a second, milliseconds between tokens and GB of the device, by batch and contender. One that does not run
    is named with its error, and one that there was no time for as such.
    """
    begun, figures = time.perf_counter(), Result()
    with made(settings.dtype, dict(settings.shape)) as path:
        for batch, length in settings.batches + settings.beyond:
            generator = torch.Generator().manual_seed(batch)
            vocabulary = dict(settings.shape)["vocab_size"]
            prompts = torch.randint(3, vocabulary, (batch, length), generator=generator).tolist()
            for name, contender in (ALL if (batch, length) in settings.batches else BEYOND).items():
                place = f"{batch} x {length}, {name}"
                if time.perf_counter() - begun > settings.limit_s:
                    figures[place] = "no time was left"
                    continue
                try:
                    figures[place] = contender(settings, path, prompts)
                except Exception as error:  # noqa: BLE001 - the others are to run
                    figures[place] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return figures


def lamina(
    settings: GpuSettings,
    path: Path,
    prompts: list[list[int]],
    memory: str,
    params: Callable[[int], SamplingParams] | None = None,
    **more: Any,
) -> Result:
    """Steps in which all decode. Prompts go to a prefill worker on the device: the host's cores would take minutes.
    ``memory``: the memory workers' device. ``params`` of so many tokens, by default greedy; ``more``: options of the
    engine.
    """
    free, tokens = _free(settings.device), settings.tokens + settings.early
    options: dict[str, Any] = {"compute_device": settings.device, "memory_device": memory, "dtype": settings.dtype}
    options |= {"max_model_len": len(prompts[0]) + tokens + 8, "max_num_seqs": len(prompts), "prefill_workers": 1}
    options |= {"memory_workers": settings.memory_workers if memory == "cpu" else 1, "transport": "shm", **more}
    with LLM(str(path), **options) as llm:
        engine, gaps, last = llm.engine, list[float](), 0.0
        for prompt in prompts:
            engine.add(prompt, (params or _greedy)(tokens))
        while len(gaps) < settings.tokens and engine.has_work:
            outputs, now = engine.step(), time.perf_counter()
            together = len(outputs) == len(prompts)
            if together and last:
                gaps.append(now - last)
            if outputs:
                last = now if together else 0.0
        used = free - _free(settings.device)
    return _rates(gaps, len(prompts), used)


def by_kernels(settings: GpuSettings, path: Path, prompts: list[list[int]], transport: str, **more: Any) -> Result:
    """Compute workers do the prompts: a memory worker that takes any from elsewhere needs a host for all messages."""
    return lamina(settings, path, prompts, settings.device, transport=transport, prefill_workers=0, **more)


def by_turns(settings: GpuSettings, path: Path, prompts: list[list[int]]) -> Result:
    """Two processes, each of which has the GPU while the other's kernels wait. Raises ValueError but for the smallest
    batch: prompts of others would take all of the time.
    """
    if len(prompts) > settings.batches[0][0]:
        raise ValueError(f"processes that take turns on a GPU are timed with batch {settings.batches[0][0]} alone")
    return by_kernels(settings, path, prompts, "shm" if settings.device == "cpu" else "cuda")


def on_half(settings: GpuSettings, path: Path, prompts: list[list[int]]) -> Result:
    """The memory worker may use half of the multiprocessors."""
    sms = (
        0 if settings.device == "cpu" else torch.cuda.get_device_properties(settings.device).multi_processor_count // 2
    )
    return by_kernels(settings, path, prompts, "loopback", memory_sms=sms)


class _TokenClock:
    """A logits processor that notes when each token is drawn."""

    def __init__(self, device: str) -> None:
        self._device, self.times = device, list[float]()

    def __call__(self, ids: Any, scores: Any) -> Any:
        if self._device != "cpu":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def within_budget(settings: GpuSettings, path: Path, prompts: list[list[int]]) -> Result:
    """KV on the host; raises ValueError where the device holds more than the budget all the same."""
    figures = lamina(settings, path, prompts, "cpu")
    if figures["device_gb"] > settings.budget_gb:
        raise ValueError(f"{figures['device_gb']:.1f} GB of the device, of {settings.budget_gb:g}")
    return figures


def offloaded(settings: GpuSettings, path: Path, prompts: list[list[int]]) -> Result:
    """The cache in the host's memory, a layer at a time on the device, of which torch gives no more than the budget."""
    part = settings.budget_gb * 1e9 / _size(settings.device)
    if settings.device != "cpu":
        torch.cuda.set_per_process_memory_fraction(min(1.0, part))
    try:
        options = {"cache_implementation": "offloaded", "prefill_chunk_size": 256}
        return transformers(settings, path, prompts, **options)
    finally:
        if settings.device != "cpu":
            torch.cuda.set_per_process_memory_fraction(1.0)


def transformers(settings: GpuSettings, path: Path, prompts: list[list[int]], **options: Any) -> Result:
    """``generate`` with ``options``, which a GPU compiles by itself for a static cache unless an option forbids it."""
    from transformers import AutoModelForCausalLM

    free, clock = _free(settings.device), _TokenClock(settings.device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings.dtype)).to(settings.device)
    _generate(model, prompts, settings.tokens, settings.device, logits_processor=[clock], **options)
    used = free - _free(settings.device)
    del model
    if settings.device != "cpu":
        torch.cuda.empty_cache()
    gaps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return _rates(gaps[len(gaps) // 2 :], len(prompts), used)  # the first ones are compiled and recorded


def _generate(model: Any, prompts: list[list[int]], tokens: int, device: str, **options: Any) -> list[list[int]]:
    ids = torch.tensor(prompts, device=device)
    count = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **count, **options)
    answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return answers


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def _sampled(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.02, max_tokens=tokens, ignore_eos=True)


def prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _rates(gaps: list[float], batch: int, used: int) -> Result:
    if not gaps:
        raise ValueError("no step in which all sequences decoded")
    median = statistics.median(gaps)
    return {"tokens_s": batch / median, "tbt_ms": median * 1e3, "steps": len(gaps), "device_gb": used / 1e9}


def _size(device: str) -> float:
    return float("inf") if device == "cpu" else torch.cuda.mem_get_info()[1]


def _free(device: str) -> int:
    """Bytes of the device, whichever program has the others."""
    return 0 if device == "cpu" else torch.cuda.mem_get_info()[0]


Contender = Callable[[GpuSettings, Path, list[list[int]]], Result]
ALL: dict[str, Contender] = {
    "lamina, memory on the host": lambda s, path, prompts: lamina(s, path, prompts, "cpu"),
    "lamina, memory on the device": lambda s, path, prompts: lamina(s, path, prompts, s.device),
    "lamina, one process": lambda s, path, prompts: lamina(s, path, prompts, s.device, transport="loopback"),
    "lamina, one process, sampled": lambda s, path, prompts: lamina(
        s, path, prompts, s.device, _sampled, transport="loopback"
    ),
    "lamina, one process, messages by kernels": lambda s, path, prompts: by_kernels(s, path, prompts, "loopback"),
    "lamina, one process, memory on half of the multiprocessors": on_half,
    "lamina, two processes, messages by kernels": by_turns,
    "transformers, static": partial(transformers, cache_implementation="static", disable_compile=True),
    "transformers, static, compiled": partial(transformers, cache_implementation="static"),
}
BEYOND: dict[str, Contender] = {"lamina, memory on the host": within_budget, "transformers, offloaded": offloaded}
