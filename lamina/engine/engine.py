"""The engine: schedule, run, postprocess. One thread calls it; requests come and go between steps."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.control import ComputeReady, RunRound, RunStep, SampledToken, SamplingRequest, StepDone
from lamina.protocol.executor import Clock, Done, EpochChanged, Executor, Report
from lamina.protocol.step_plan import SurvivingKv
from lamina.request import CompletionOutput, ErrorOrigin, RequestOutput, RequestTimes, ResumedCompletion, SamplingParams
from lamina.scheduler.request_validation import (
    check_cache_options,
    check_discard,
    check_stop_tokens,
    check_token_ids,
    evicts_kv,
    kv_mode_of,
    prompt_too_long_message,
)
from lamina.scheduler.sampling_requests import completion_seed, prompt_logprob_requests_of, sampling_requests_of
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep, TransferResult
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.context_overflow import build_context_overflow
from lamina.scheduler.sessions.session_table import SessionName, Sessions
from lamina.scheduler.sessions.token_ranges import TokenRanges, remove_ranges, union
from lamina.scheduler.surviving_kv import SurvivingTokens, num_stored_tokens

from .detokenizer import DecodeToken, IncrementalDetokenizer, build_text_streams
from .request import Request
from .scheduler_factory import (
    build_prefix_cache,
    build_scheduler,
    build_slo_admission,
    drop_session,
    new_block_tables,
    refresh_prefill_stores,
)
from .tuning.tuner import Tuner

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over the workers of a ``Executor``. One thread at a time uses it."""

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(
        self, executor: Executor, config: EngineConfig, clock: Clock = time.monotonic, trace: Recorder = NULL_RECORDER
    ) -> None:
        self.config, self.executor, self.worker_info = config, executor, executor.ready
        self._clock, self._trace = clock, trace
        self._accounting = new_block_tables(self.worker_info)
        self._tuner: Tuner | None = None
        num_batches = 1 if config.topology.measures_pipeline else config.topology.max_batches
        self.sessions = Sessions()
        prefixes = build_prefix_cache(config, self._accounting, self.sessions, clock)
        self.slo_admission = build_slo_admission(config, prefixes, clock, trace)
        self.scheduler = build_scheduler(
            config,
            self.worker_info,
            self._accounting,
            num_batches,
            self.slo_admission,
            prefixes,
            self.scheduler_class,
        )
        stripe = self.worker_info.stripe * self.worker_info.block_size * self._accounting.num_kv_shards
        self._overflow = build_context_overflow(config.overflow, self.worker_info.max_model_len, stripe)
        self._in_flight: dict[tuple[int, int], ScheduledStep] = {}  # in flight, by batch and step
        self._seeds = random.Random(config.batching.seed)
        self._next_round = self._next_request = 0
        self.idle = False  # whether the last pass of the loop found nothing to do: what is left waits for its caller
        # For room, when idle: "" = some may come; else why none.
        self.capacity_probe: Callable[[], str | None] = lambda: None
        self._requests, self._finished_by_replay = dict[int, Request](), list[int]()

    @property
    def has_work(self) -> bool:
        """Whether some request is unfinished."""
        return bool(self._requests)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """KV blocks of each layer group that sequences can still have: free ones, and those of finished ones."""
        return self.scheduler.free_blocks

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        text: str | None = None,
        make_pieces: Callable[[], IncrementalDetokenizer] | None = None,
        resume_from: Iterable[ResumedCompletion] = (),
        external_sampling: bool = False,
        decode_token: DecodeToken | None = None,
        terms: CacheOptions = DEFAULT_CACHE_OPTIONS,
        cacheable: bool = True,
        accepted: bool = False,
    ) -> int:
        """Queue a prompt and return the request's id.

        ``resume_from``: tokens of completions that another engine began; they continue with the seed that they had.
        ``external_sampling``: ``set_token`` chooses the tokens of its only completion. ``decode_token``: for logprobs.
        ``cacheable``: its KV serves other requests after its end, on these ``terms``.
        Raises ValueError for a prompt that cannot be served and, unless it was ``accepted`` before, OverloadedError.
        """
        self.check(prompt, params, terms)
        request_id, self._next_request = self._next_request, self._next_request + 1
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        known = self.sessions.get(terms.session) if terms.session else None
        given, discarded = prompt, TokenRanges()
        if self._overflow and params.prompt_logprobs is None and not external_sampling:
            before = union([*(known.discarded_ranges if known else ()), *terms.discard_ranges])
            discarded = self._overflow.ranges_to_discard(len(prompt), params.max_tokens, before)
            prompt = remove_ranges(prompt, discarded)
        sequences = [self._sequence(request_id, prompt, params, completion_seed(seed, i), i) for i in range(params.n)]
        for sequence in sequences:
            sequence.external_sampling, sequence.discarded_ranges, sequence.do_not_cache = (
                external_sampling,
                discarded,
                not cacheable,
            )
            sequence.original_prompt = given if discarded else []
            sequence.affinity_key, sequence.retention_s, sequence.priority = (
                terms.affinity_key,
                terms.retention_s,
                terms.priority,
            )
            sequence.salt, sequence.evicts_kv, sequence.full_attention = kv_mode_of(terms.salt, params, self.config)
        self.slo_admission.check_admission(sequences, self.scheduler.max_sequences_of, accepted=accepted)
        if terms.session:  # none is made for who is refused
            for sequence in sequences:
                sequence.session = self.sessions.get_or_create(terms.session)
        outputs, times = [s.output for s in sequences], RequestTimes(self._clock())
        output = RequestOutput(request_id, text, list(given), outputs, times)
        output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        request = Request(output, sequences, build_text_streams(params, make_pieces), decode_token)
        for one in resume_from:
            self._replay(request, one)
        self._requests[request_id] = request  # not one whose tokens could not be taken
        if output.finished:  # by what was told, such as under a smaller --max-model-len
            self._finished_by_replay.append(request_id)
        for sequence in sequences:
            if not sequence.finished:
                self.scheduler.add(sequence)
        return request_id

    def _replay(self, request: Request, resumed: ResumedCompletion) -> None:
        """Take the tokens of one completion as if they were drawn now. The prompt's scores were told with the first."""
        sequence = request.sequences[resumed.index]
        if resumed.index == 0 and resumed.token_ids:
            request.output.prompt_logprobs, sequence.num_scored_prompt_tokens = None, len(sequence.prompt) - 1
        for token in resumed.token_ids:
            sequence.num_output_placeholders += 1
            request.append(sequence, SampledToken(sequence.id, token))

    def check(self, prompt: list[int], params: SamplingParams, terms: CacheOptions = DEFAULT_CACHE_OPTIONS) -> None:
        """Raises ValueError, in one line, for a prompt or parameters that cannot be served."""
        limit, vocab = self.worker_info.max_model_len, self.worker_info.vocab_size
        check_cache_options(terms, params, self.config)
        if terms.discard_ranges:
            check_discard(terms.discard_ranges, len(prompt), params, self._overflow)
        if not prompt:
            raise ValueError("the decoder prompt cannot be empty: it needs at least one token")
        if len(prompt) >= limit and (self._overflow is None or params.prompt_logprobs is not None):
            raise ValueError(prompt_too_long_message(len(prompt), limit))
        check_token_ids(prompt, params, vocab)
        evicts_kv(params, self.config)
        check_stop_tokens(params, self._stops(params), vocab)

    def step(self) -> list[RequestOutput]:
        """One pass of the loop; returns the requests that got tokens. Raises WorkerError when a worker is lost."""
        if self._finished_by_replay:
            ended, self._finished_by_replay = self._finished_by_replay, []
            return self._end_finished(self._requests[i] for i in ended if i in self._requests)
        start, steps = self._trace.now(), self.scheduler.schedule()
        self.idle = not steps and not self._in_flight and not self.scheduler.must_wait_for_transfer
        if self.idle and self._requests:
            if (
                change := self.executor.check_workers()
            ) is not None:  # memory workers that come may be all that is waited for
                self.idle = False
                return self._change(change)
            if (report := self.capacity_probe()) is not None:
                self.idle = False
                return self._refuse(report) if report else []
        for step in steps if self._trace.native_buffer is not None else ():
            self._trace.add(Event.SCHEDULE, start, step.plan, value=step.num_attended_pairs)
        done, start = self._run(steps), self._trace.now()
        outputs = self._take(done)
        if isinstance(done, StepDone):
            self._trace.add(Event.POSTPROCESS, start, done)
        return outputs

    def get_logits(self, request_id: int) -> bytes:
        """Of a held request, behind its last token: see SampledToken. Empty until they have come."""
        request = self._requests[request_id]
        return request.logits if request.sequences[0].awaits_external_token else b""

    def set_token(self, request_id: int, token: int) -> None:
        """The next token of a held request whose logits have come. Raises ValueError for one that is no token."""
        if not 0 <= token < self.worker_info.vocab_size:
            raise ValueError(f"token id {token} is out of vocabulary: it has {self.worker_info.vocab_size} tokens")
        request = self._requests[request_id]
        request.sequences[0].set_external_token(token)
        request.output.outputs[0].token_ids.append(token)
        if request.output.finished:
            del self._requests[request_id]

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its KV is freed with the next step. What became of it; None for unknown and finished ids."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            request.end_sequence(sequence, "abort")
        request.output.times.finished_s = self._clock()
        return request.output

    def release_idle_blocks(self) -> None:
        """Where no request is left, take in what is in flight and free its blocks: an idle engine holds none."""
        while not self._requests and (self.scheduler.num_running or self._in_flight or self.scheduler.has_pending_ops):
            self.step()
        if not self._requests:
            self.scheduler.drop_cancelled()

    def finish_in_flight(self) -> list[RequestOutput]:
        """Take in what is in flight and begin nothing; returns the requests that got tokens. Raises WorkerError."""
        touched = dict[int, RequestOutput]()
        while self._in_flight or self.scheduler.has_transfers:
            touched |= {output.request_id: output for output in self._take(self.executor.wait())}
        return list(touched.values())

    def check_workers(self) -> list[RequestOutput]:
        """Of an engine without work: whether its workers live. Raises WorkerError when one is lost for good."""
        change = self.executor.check_workers()
        return [] if change is None else self._change(change)

    def resume(self, ready: ComputeReady) -> None:
        """Go on with workers that have met anew, and have kept their KV. Raises ValueError while steps are in flight,
        and where the capacity is another one than before.
        """
        if self._in_flight:
            raise ValueError("workers met anew while steps were in flight: rest first")
        if (ready.num_blocks, ready.kv_shards) != (self.worker_info.num_blocks, self.worker_info.kv_shards):
            raise ValueError(
                f"memory workers had {self.worker_info.num_blocks} KV blocks, and now have {ready.num_blocks}"
            )
        self.scheduler.begin_epoch(ready.epoch, ready.replicas or self.worker_info.replicas)
        self.worker_info = refresh_prefill_stores(self.scheduler, self.config, self.worker_info, ready.prefill_stores)
        self.scheduler.resend_penalties()
        self.scheduler.features.resume(ready)

    def reset_prefix_cache(self) -> None:
        """Find no KV of finished requests any more, here or in a later engine; blocks are free with the next step."""
        self.scheduler.reset_prefix_cache(self.executor.begin_era() if self.worker_info.storage else b"")

    def drop_session(self, name: SessionName) -> bool:
        """Forget a session and give up its KV, but for what others have too; the blocks are free with the next step,
        or once the engine settles. False: there is no such session.
        """
        return drop_session(self.scheduler, name)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.executor.close()

    def _sequence(self, request_id: int, prompt: list[int], params: SamplingParams, seed: int, index: int) -> Sequence:
        limit = self.worker_info.max_model_len
        max_len = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
        output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        return Sequence(request_id, params, seed, list(prompt), output, max_len, self._stops(params))

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        eos = [] if params.ignore_eos else self.worker_info.eos_token_ids
        return frozenset([*eos, *(params.stop_token_ids or [])])

    def _change(self, change: EpochChanged) -> list[RequestOutput]:
        """Take in what was done, take back what was not, and go on under another epoch; the requests that got
        tokens.
        """
        touched, now = dict[int, RequestOutput](), self._clock()
        had = num_stored_tokens(self.scheduler.running)
        met: ComputeReady | EpochChanged = change
        while isinstance(met, EpochChanged):
            for done in met.done:
                touched |= {output.request_id: output for output in self._postprocess(done)}
            met = self.executor.resume(self._roll_back(met))
        self.resume(met)
        again, pause_s = had - num_stored_tokens(self.scheduler.running), self._clock() - now
        log.info("epoch %d: all sequences go on after %.3f s; %d tokens are computed again", met.epoch, pause_s, again)
        return list(touched.values())

    def _roll_back(self, change: EpochChanged) -> list[SurvivingKv]:
        for request in self._requests.values():
            scores = request.output.prompt_logprobs
            if scores is not None:
                request.sequences[0].num_scored_prompt_tokens = len(scores) - 1
        steps, self._in_flight = self._in_flight, {}
        kept = SurvivingTokens(self._accounting, self.worker_info.holders, change.surviving)
        keep = self.scheduler.roll_back(steps.values(), kept.count)
        if change.capacity:
            self.worker_info = msgspec.structs.replace(self.worker_info, **change.capacity._asdict())
            keep = self.scheduler.adopt_blocks(new_block_tables(self.worker_info), keep, change.new_shards)
        return keep

    def _take(self, done: Done | EpochChanged | None) -> list[RequestOutput]:
        if isinstance(done, EpochChanged):
            return self._change(done)
        return self._postprocess(done) if isinstance(done, StepDone | None) else self._on_report(done)

    def _on_report(self, report: Report) -> list[RequestOutput]:
        """A memory worker has saved, loaded or scored KV, or has not; the requests that got tokens or ended by that."""
        transfer = self.scheduler.on_report(report)
        if transfer is None or transfer.loaded_sequence is None:
            return self._failed(transfer) if transfer is not None and transfer.error else []
        if transfer.error:
            return self._failed(transfer)
        early, transfer.loaded_sequence.early_tokens = transfer.loaded_sequence.early_tokens, []
        return self._append_sampled((transfer.loaded_sequence, drawn) for drawn in early)

    def _failed(self, transfer: TransferResult) -> list[RequestOutput]:
        log.warning("%s", transfer.error)
        request = self._requests.get(transfer.loaded_sequence.request_id) if transfer.loaded_sequence else None
        if (
            transfer.loaded_sequence is None
            or request is None
            or self.config.offload.kv_load_failure_policy == "recompute"
        ):
            if request is not None:
                request.output.num_cached_tokens = None  # to be told anew
            return []
        request.output.outputs[transfer.loaded_sequence.output.index].blame = ErrorOrigin.SERVER
        request.end_sequence(transfer.loaded_sequence, "error", transfer.error)
        return self._end_finished([request])

    def _refuse(self, why: str) -> list[RequestOutput]:
        """The request that is to run next ends."""
        request = self._requests[self.scheduler.waiting[0].request_id]
        request.refuse(why)
        return self._end_finished([request])

    def _end_finished(self, touched: Iterable[Request]) -> list[RequestOutput]:
        now, outputs = self._clock(), list[RequestOutput]()
        for request in touched:
            finished = request.output.finished
            request.output.times.mark(now, finished=finished)
            if finished:
                request.output.num_preemptions = sum(s.num_preemptions for s in request.sequences)
                del self._requests[request.output.request_id]
            outputs.append(request.output)
        return outputs

    def _run(self, steps: list[ScheduledStep]) -> Done | EpochChanged | None:
        """Send a round off; then wait for the next step that is done, unless another round can be queued first."""
        if steps:
            self.executor.submit(RunRound(round=self._next_round, steps=[self._prepare(s) for s in steps]))
            self._next_round += 1
        for chunk in self.scheduler.take_prefill_steps():
            if chunk.prefill_worker is not None:
                new = RunRound(round=chunk.plan.step, steps=[self._prepare(chunk)])
                self.executor.submit_prefill(chunk.prefill_worker, new)
        waits = self._in_flight or self.scheduler.must_wait_for_transfer
        if not waits or (steps and self.scheduler.can_schedule_ahead):
            return None
        return self.executor.wait()

    def _prepare(self, step: ScheduledStep) -> RunStep:
        ends, row, now = {}, 0, self._clock()
        scores: list[SamplingRequest] = []
        for sequence, rows in zip(step.sequences, step.plan.rows, strict=True):
            if rows.first == sequence.num_cached_tokens and (request := self._requests.get(sequence.request_id)):
                request.on_scheduled(sequence, now)
                self.slo_admission.on_inline_prefill_started(sequence)
            chunk_scores = prompt_logprob_requests_of(sequence, rows.first, rows.count, row)
            scores += chunk_scores
            step.prompt_logprob_requests += [sequence] * len(chunk_scores)
            row += rows.count
            ends[sequence] = row - 1
        draws = [*scores, *sampling_requests_of(step, ends, len(scores))]
        self._in_flight[step.plan.batch, step.plan.step] = step
        return RunStep(plan=step.plan, token_ids=step.tokens, sampling_requests=draws)

    def _postprocess(self, done: StepDone | None) -> list[RequestOutput]:
        if done is None:
            return []
        step = self._in_flight.pop((done.batch, done.step))
        step.fetch_s = done.fetch_s
        for sequence, drawn in zip(step.prompt_logprob_requests, done.sampled_tokens, strict=False):
            if request := self._requests.get(sequence.request_id):
                request.append_prompt_logprob(drawn)
        step.drawn = done.sampled_tokens[len(step.prompt_logprob_requests) :]
        outputs = self._append_sampled(zip(step.sampled_sequences, step.drawn, strict=True))
        finished = self.scheduler.on_step_done(step)
        for line in step.warnings:
            log.warning("%s", line)
        if finished and self._tuner and self._tuner.observe(finished):
            self.set_tuner(self._tuner)
        return outputs

    def _append_sampled(self, each: Iterable[tuple[Sequence, SampledToken]]) -> list[RequestOutput]:
        """Take drawn tokens in; the requests that got some."""
        touched = {}
        for sequence, drawn in each:
            if sequence.hold_back(drawn):
                continue
            request = self._requests.get(sequence.request_id)
            if sequence.finished or request is None:
                sequence.num_output_placeholders -= 1  # a row that turned out to be one too many
                continue
            request.append(sequence, drawn)
            if request.is_first_token_of(sequence) and (refusal := self.slo_admission.check_decode_admission(sequence)):
                request.refuse_late(refusal)
            touched[sequence.request_id] = request
        return self._end_finished(touched.values())

    def set_tuner(self, tuner: Tuner) -> None:
        """Have it say how many batches take turns."""
        self._tuner, self.worker_info.summary["plan"] = tuner, tuner.reason
        self.scheduler.set_num_batches(tuner.num_batches)
