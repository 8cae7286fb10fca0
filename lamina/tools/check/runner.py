"""Runs the settings of ``lamina-launch check`` and compares each with ``transformers``."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from lamina.api.llm import LLM
from lamina.config.engine_config import ONLINE, EngineConfig, ModelOptions
from lamina.config.flat_options import flat_options, replace_options
from lamina.kv.stored_format import dequantise, is_scaled, quantise, stored_dtype
from lamina.models.cache_name import cache_argument
from lamina.models.load import load
from lamina.observe.failpoints import Failpoint
from lamina.ops import gemm
from lamina.protocol.executor import WorkerError
from lamina.request import RequestOutput, SamplingParams
from lamina.utils.emulated_device import VARIABLE as EMULATION

from .agreement import ERROR_ALLOWED, Agreement, compare
from .fault_case import FaultRunner, FaultVisibleError, failpoint_for
from .low_memory_case import LowMemoryCase
from .matrix import BASE_OPTIONS, BASE_STORE, Setting
from .recorded_llm import RecordedLLM
from .resize_case import ResizeFailedError, ResizeRunner
from .server_case import generate_served
from .verdict import Outcome, Verdict, failed_verdict, judge

# Tokens of the random prompts: several prefill chunks, several chunks of stored tokens, and a single token.
LENGTHS = (3, 17, 1, 290, 33, 140)
DTYPE_FACTOR = 4.0  # by which the error of narrower numbers may exceed that of transformers with the same rounding
ALTERNATIVES = 4  # number of alternatives whose log-probabilities are compared too


@contextmanager
def captured_order(setting: Setting) -> Iterator[None]:
    """Make workers that start in this block send Q with K and V, if ``setting`` says so."""
    if setting.early_q:
        yield
        return
    before = os.environ.get(EMULATION)
    os.environ[EMULATION] = json.dumps({**json.loads(before or "{}"), "early_q": False})
    try:
        yield
    finally:
        del os.environ[EMULATION]
        os.environ |= {} if before is None else {EMULATION: before}


class Check:
    """Runs equal prompts over many settings."""

    def __init__(self, model: str, base: EngineConfig, prompts: Sequence[str], max_tokens: int, seed: int) -> None:
        """``prompts``: if empty, random ones of ``seed``."""
        self._model = model
        self._base = base
        self._prompts = prompts
        self._params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=ALTERNATIVES, seed=seed
        )
        self._reference = ReferenceModel(model, base.model)
        self._outcomes: dict[Setting, Outcome] = {}
        self._low_memory: LowMemoryCase | None = None  # set with the first outcome, which the next ones need
        self._ids: list[list[int]] = []  # of the prompts

    def run(self, settings: Sequence[Setting]) -> Iterator[Verdict]:
        """Yield the verdict on each setting as soon as it is known. The first one must start: its errors (ValueError,
        ImportError, OSError, WorkerError) are raised. A later one that does not start is refused in its verdict.
        """
        for _, group in groupby(settings, key=lambda s: (sorted(s.options.items()), s.runs_in_server, s.early_q)):
            left = list(group)
            while left:
                try:
                    for verdict in self._run(list(left)):
                        left.pop(0)
                        yield verdict
                except WorkerError as e:  # it ended the engine: the next settings get another one
                    if not self._outcomes:
                        raise
                    yield failed_verdict(left.pop(0), str(e), held=False)

    def _run(self, settings: list[Setting]) -> Iterator[Verdict]:
        start, first = time.monotonic(), settings[0]
        with (
            TemporaryDirectory(prefix="lamina-check-") as folder,
            failpoint_for(settings, Path(folder)) as tripwire,
            captured_order(first),
        ):
            try:
                config = self._config_of(first)
                if first.runs_in_server:
                    yield from (self._verdict_of(s, partial(self._served, config, s, start)) for s in settings)
                    return
                llm = RecordedLLM(self._model, **flat_options(config))
            except (ValueError, ImportError, OSError) as e:
                if not self._outcomes:
                    raise
                yield from (failed_verdict(s, str(e), held=None) for s in settings)
                return
            with llm:
                if (
                    first.lends
                    and self._low_memory is not None
                    and (why := self._low_memory.why_not_low(llm.engine.worker_info))
                ):
                    yield from (failed_verdict(s, why, held=None) for s in settings)
                    return
                for setting in settings:
                    yield self._run_one(llm, tripwire, setting, start)
                    start = time.monotonic()

    def _config_of(self, setting: Setting) -> EngineConfig:
        config = replace_options(self._base, setting.options)
        if setting.lends and self._low_memory is not None:
            config = replace_options(config, self._low_memory.options(config))
        if setting.swaps and self._low_memory is not None:
            config = replace_options(config, self._low_memory.preemption_options(config))
        return config

    def _run_one(self, llm: RecordedLLM, tripwire: Failpoint | None, setting: Setting, start: float) -> Verdict:
        """``tripwire``: of the engine's workers, if one is to die."""
        run: FaultRunner | ResizeRunner = ResizeRunner(llm, setting.changes)
        if setting.fault is not None and tripwire is not None:
            run = FaultRunner(llm, tripwire, setting.fault)
        before = _loaded_bytes(llm)
        if setting.loads_from_disk:
            llm.engine.finish_in_flight()  # until all is saved
            llm.engine.scheduler.evict_retained()
        verdict = self._verdict_of(setting, partial(self._outcome, llm, run, setting, start))
        if setting.loads_from_disk and _loaded_bytes(llm) == before:
            verdict = failed_verdict(setting, "no KV was loaded: prompts need more than 128 tokens", held=None)
        if setting.drops_blocks and llm.engine.scheduler_stats.pruned_blocks == 0:
            more = f"no KV block was dropped: prompts need more than {llm.engine.config.kv.kv_budget} tokens"
            verdict = failed_verdict(setting, more, held=None)
        if setting.swaps and not self._outcomes[setting].num_preemptions:
            verdict = failed_verdict(setting, "no sequence was preempted: a window frees blocks", held=None)
        return verdict

    def _verdict_of(self, setting: Setting, run: Callable[[], Outcome]) -> Verdict:
        try:
            return self._judge(setting, run())
        except ValueError as e:
            if not (setting.changes or setting.fault):
                raise
            return failed_verdict(setting, str(e), held=None)
        except ResizeFailedError as e:
            return failed_verdict(setting, f"memory workers could not come or go: {e}", held=False)
        except FaultVisibleError as e:
            return failed_verdict(setting, str(e), held=False)

    def _outcome(self, llm: RecordedLLM, run: FaultRunner | ResizeRunner, setting: Setting, start: float) -> Outcome:
        recording = llm.engine.recording
        recording.clear()
        prompts = list(self._prompts) or random_prompts(llm, self._params)
        outputs = [
            o
            for batch in ([[p] for p in prompts] if setting.runs_alone else [prompts])
            for o in run.generate(batch, self._params)
        ]
        stats, info = llm.stats(), llm.engine.worker_info
        if self._low_memory is None and info.bind is not None:
            longest = max(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
            self._ids = [o.prompt_token_ids for o in outputs]
            self._low_memory = LowMemoryCase(
                longest, info.bind.layers, info.max_model_len, [len(ids) for ids in self._ids]
            )
        counts = llm.engine.scheduler_stats
        return replace(
            self._compared(llm.engine.config, outputs, start),
            plans=recording.plans,
            num_preemptions=counts.preemptions,
            num_swapped=counts.swapped_sequences,
            idle=tuple(n for n, s in stats.items() if n.startswith("memory") and not s["stored_bytes"]),
            lent=sum(recording.lent.values()),
            moved_bytes=run.moved_bytes,
            had_kv=run.had_kv,
        )

    def _served(self, config: EngineConfig, setting: Setting, start: float) -> Outcome:
        if not self._ids:
            raise ValueError(f"{setting.axis} needs the prompts of the base run")
        outputs = generate_served(self._model, config, self._ids, self._params)
        return self._compared(config, outputs, start)

    def _compared(self, config: EngineConfig, outputs: list[RequestOutput], start: float) -> Outcome:
        """Compare outputs with the reference."""
        agreement, bound = self._reference.agreement(config.model, config.kv.kv_cache_dtype, outputs)
        return Outcome(
            completions=[o.outputs[0] for o in outputs],
            plans=[],
            num_preemptions=0,
            agreement=agreement,
            bound=bound,
            seconds=time.monotonic() - start,
        )

    def _judge(self, setting: Setting, outcome: Outcome) -> Verdict:
        self._outcomes[setting] = outcome
        if setting.compared_with is None:
            return judge(setting, outcome, None)
        if setting.compared_with not in self._outcomes:
            return failed_verdict(setting, f"{setting.compared_with.axis} could not be run", held=None)
        return judge(setting, outcome, self._outcomes[setting.compared_with])


def _loaded_bytes(llm: LLM) -> float:
    return sum(values.get("kv_loaded_bytes", 0.0) for values in llm.stats().values())


def random_prompts(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """Return token ids, the same for the same model and seed; as long as LENGTHS, or as the model allows."""
    info, draw = llm.engine.worker_info, random.Random(params.seed)
    longest = info.max_model_len - (params.max_tokens or 0)
    if longest < 1:
        raise ValueError(
            f"--max-tokens {params.max_tokens} leaves no room for a prompt: {info.max_model_len} tokens fit"
        )
    return [[draw.randrange(info.vocab_size) for _ in range(min(n, longest))] for n in LENGTHS]


class ReferenceModel:
    """``transformers`` in fp32, with the weights rounded to the dtype of a run, or to its codes of few bits."""

    def __init__(self, model: str, options: ModelOptions) -> None:
        self._source = model
        self._options = options
        self._full: dict[str, Any] = {}  # the model in fp32, by --quantization
        self._known: dict[str, tuple[Agreement, float]] = {}  # by completions: most runs give the same ones

    def agreement(self, run: ModelOptions, kv_dtype: str, outputs: list[RequestOutput]) -> tuple[Agreement, float]:
        """Return the agreement of ``outputs`` with the reference, and the bound of their error.

        The bound is larger for half precision, for K and V stored in 8 bits and for rows of int8. It is then
        DTYPE_FACTOR times the error of transformers itself, on the same tokens with the same rounding.
        """
        completions = [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
        key = repr((run.dtype, kv_dtype, run.quantization, run.quantization_compute, completions))
        if key not in self._known:
            self._known[key] = self._compare(run, kv_dtype, outputs)
        return self._known[key]

    def _compare(self, run: ModelOptions, kv_dtype: str, outputs: list[RequestOutput]) -> tuple[Agreement, float]:
        floats = structs.replace(run, quantization_compute=BASE_OPTIONS["quantization_compute"])
        if full := run.dtype == BASE_OPTIONS["dtype"]:
            if run.quantization not in self._full:
                self._full[run.quantization] = self._load(floats)
            if kv_dtype == BASE_STORE and run == floats:
                return compare(self._full[run.quantization], outputs), ERROR_ALLOWED
        model = self._full[run.quantization] if full and run == floats else self._load(run)
        rounded = [_scores(model, o, QuantizedCache(kv_dtype)) for o in outputs]
        exact = self._full[run.quantization] if full else model.float()
        own_error = max(float((a - _scores(exact, o)).abs().max()) for a, o in zip(rounded, outputs, strict=True))
        return compare(exact, outputs), max(ERROR_ALLOWED, DTYPE_FACTOR * own_error)

    def _load(self, run: ModelOptions) -> Any:
        """Load the model as a run has it. Weights that the run rounds are multiplied by torch."""
        given = self._options
        model: Any = load(
            self._source,
            dtype=run.dtype,
            trust_remote_code=given.trust_remote_code,
            allow_unused_weights=given.allow_unused_weights,
            hf_overrides=given.hf_overrides,
            quantization=run.quantization,
            quantization_compute=run.quantization_compute,
            backend=gemm.get("torch", torch.get_num_threads()) if run.quantization in ONLINE else None,
        ).model
        model.generation_config = GenerationConfig()  # plain greedy decoding without an end token
        return model


class QuantizedCache(DynamicCache):  # type: ignore[misc]
    """A cache of transformers with K and V as --kv-cache-dtype stores them."""

    def __init__(self, kv_dtype: str) -> None:
        super().__init__()
        self._kv_dtype = kv_dtype

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Add K and V [batch, heads, tokens, dim] of a layer, as transformers' caches do, but rounded as the pool
        stores them.
        """
        wire = key_states.dtype
        if is_scaled(dtype := stored_dtype(self._kv_dtype, wire)):
            key_states, value_states = (dequantise(*quantise(x, dtype)).to(wire) for x in (key_states, value_states))
        both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *more, **options)
        return both


@torch.inference_mode()
def _scores(model: Any, output: RequestOutput, cache: QuantizedCache | None = None) -> Tensor:
    """Return log-probabilities [tokens] of the generated tokens, in fp32."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    ids = torch.tensor([prompt + tokens[:-1]])
    options = {} if cache is None else {cache_argument(model): cache}
    logits = model(ids, **options).logits[0, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
