"""Profiling: measures both pools of a started engine with synthetic prompts, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

from lamina.engine.engine import Engine
from lamina.request import RequestOutput, SamplingParams
from lamina.utils.progress import OnProgress

from .round_time_model import RoundMeasurement, fit_round_times
from .tuner import Tuner

ROWS = (1, 4, 16)
SHORT, LONG = 8, 512  # tokens of a prompt
WARM, TRIAL = 2, 7  # rounds before, and of, a measurement
NUM_LONG_PROMPTS = 4
EXTRA_TOKENS = 6  # more tokens for each sequence, since a round is queued ahead


def tune_num_batches(engine: Engine, on_progress: OnProgress, clock: Callable[[], float] = time.perf_counter) -> None:
    """With ``--pipeline auto``: measure, and give the tuner its model. ``on_progress`` counts measurements.

    Raises ValueError if ``--max-model-len`` is too short, and WorkerError.
    """
    topology, tuner = engine.config.topology, engine.feature(Tuner)
    if tuner is None or topology.max_batches == 1:
        return
    shapes, measured = _shapes(engine), list[RoundMeasurement]()
    total = len(shapes) + topology.max_batches - 1
    for rows, prompt in shapes:
        on_progress("measuring", len(measured), total)
        measured.append(_measured(engine, rows, prompt, 1, clock))
    laws, last = fit_round_times(measured, topology.replicas), measured[-1]
    for n in range(2, min(topology.max_batches, last.rows) + 1):  # pools that work at once may share cores or memory
        on_progress("measuring", len(measured) + n - 2, total)
        took = _measured(engine, last.rows, shapes[-1][1], n, clock).round_s
        laws.extra_batch_s[n] = took / laws.seconds(n, last.rows, last.tokens)
    tuner.use(laws)


def _shapes(engine: Engine) -> list[tuple[int, int]]:
    """The shapes to measure, as (sequences, tokens of a prompt), limited by the room for them."""
    batching, limit, places = engine.config.batching, engine.worker_info.max_model_len, _places(engine)
    each = 2 if engine.config.kv.kv_error_budget else 1  # sequences, with the reference decode of one

    def room(length: int) -> int:
        return int(engine.scheduler.max_sequences_of(length) / places / each) * places

    least = SHORT + _answer(engine, 1, SHORT)
    if limit < least:
        raise ValueError(
            f"--pipeline auto measures with sequences of {least} tokens, and --max-model-len is {limit}: raise it, or "
            "use --pipeline N"
        )

    def most(rows: int, prompt: int) -> int:
        fit = (r for r in range(rows, 0, -1) if prompt + _answer(engine, r, prompt) <= limit)
        return max(1, min(next(fit, 1), batching.max_num_seqs // each, room(prompt + _answer(engine, rows, prompt))))

    rows = sorted({most(r, SHORT) for r in ROWS})
    few = min(rows[-1], NUM_LONG_PROMPTS)
    long = max(SHORT, min(LONG, 2 * batching.prefill_chunk, limit - _answer(engine, few, 2 * batching.prefill_chunk)))
    while long > SHORT and room(long + _answer(engine, 1, long)) < 1:
        long = max(SHORT, long // 2)
    return [*((r, SHORT) for r in rows), (most(few, long), long)]


def _places(engine: Engine) -> int:
    """The number of places in one of which a sequence lies whole; 1 if each memory worker has a part of it."""
    info = engine.worker_info
    return 1 if info.stripe_blocks else len({*info.kv_shards})


def _answer(engine: Engine, rows: int, prompt: int) -> int:
    """The output tokens of a sequence. The first ones come while prompts of others are computed."""
    return rows * -(-prompt // engine.config.batching.prefill_chunk) + WARM + TRIAL + EXTRA_TOKENS


class _Probe:
    """A number of synthetic sequences, all of which decode."""

    def __init__(self, engine: Engine, rows: int, prompt: int, answer: int) -> None:
        self._engine, self._answer = engine, answer
        vocab = engine.worker_info.vocab_size
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0, seed=0)
        prompts = [[(i + 1) % vocab] * prompt for i in range(rows)]
        self._asked = [engine.add(ids, params, cacheable=False, accepted=True) for ids in prompts]
        self._first: RequestOutput | None = None  # output of the first sequence

    def begin(self) -> bool:
        """Run steps until all decode. Returns False if the first one then has too few tokens left."""
        begun = set[int]()
        while len(begun) < len(self._asked) and not self._engine.idle:
            begun |= self._note(self._engine.step())
        return self._answer - self._length >= WARM + TRIAL + EXTRA_TOKENS // 2 and not self._engine.idle

    @property
    def _length(self) -> int:
        """The number of output tokens of the first sequence."""
        return len(self._first.outputs[0].token_ids) if self._first else 0

    def _note(self, outputs: Iterable[RequestOutput]) -> set[int]:
        outputs = list(outputs)
        self._first = next((o for o in outputs if o.request_id == self._asked[0]), self._first)
        return {output.request_id for output in outputs}

    def finish_in_flight(self) -> int:
        """Wait for all steps in flight. Returns the number of output tokens of the first sequence."""
        self._note(self._engine.finish_in_flight())
        return self._length

    def times(self, count: int, clock: Callable[[], float]) -> list[float]:
        """The times at which the first sequence gets its next ``count`` tokens."""
        ends = list[float]()
        while len(ends) < count:
            if self._asked[0] in self._note(self._engine.step()):
                ends.append(clock())
        return ends

    def cancel(self) -> None:
        """Cancel the sequences and free their blocks."""
        for request in self._asked:
            self._engine.cancel(request)
        self._engine.release_idle_blocks()


def _begun(engine: Engine, rows: int, prompt: int) -> _Probe:
    """Sequences that decode together. The first ones get more tokens if others take long to begin. Raises ValueError
    if they never decode together.
    """
    answer, limit = _answer(engine, rows, prompt), engine.worker_info.max_model_len - prompt
    while True:
        probe = _Probe(engine, rows, prompt, answer)
        if probe.begin():
            return probe
        probe.cancel()
        if answer >= limit:
            size = prompt + _answer(engine, rows, prompt)
            raise ValueError(
                f"--pipeline auto: {rows} sequences of {size} tokens have no room: raise --kv-cache-memory-bytes"
            )
        answer = min(2 * answer, limit)


def _measured(engine: Engine, rows: int, prompt: int, n: int, clock: Callable[[], float]) -> RoundMeasurement:
    engine.scheduler.set_num_batches(n)
    probe = _begun(engine, rows, prompt)
    since, before = probe.finish_in_flight(), engine.executor.stats()
    times = probe.times(WARM + TRIAL, clock)
    steps, after = probe.finish_in_flight() - since, engine.executor.stats()
    probe.cancel()
    spent = {w: {k: max(0.0, v - before.get(w, {}).get(k, 0.0)) for k, v in s.items()} for w, s in after.items()}
    compute = [s for w, s in spent.items() if w.startswith("compute-")]
    computed_s = sum(s.get("slice_s", 0.0) + s.get("sample_s", 0.0) for s in compute)
    attended_s = max((s.get("attend_s", 0.0) + s.get("write_s", 0.0) for s in spent.values()), default=0.0)
    return RoundMeasurement(
        rows=rows,
        tokens=rows * (prompt + since + steps / 2),
        slices_s=computed_s / engine.config.topology.tensor_parallel_size / steps,
        attention_s=attended_s / steps,
        round_s=median(b - a for a, b in pairwise(times[WARM - 1 :])),
    )
