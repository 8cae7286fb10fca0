"""The engine: schedules steps, runs them on the workers, and appends sampled tokens to requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.control import ComputeReady, RunRound, RunStep, SampledToken, SamplingRequest, StepDone, Vocabulary
from lamina.protocol.executor import Clock, Done, EpochChanged, Executor, Report
from lamina.protocol.step_plan import SurvivingKv
from lamina.request import OverloadedError, RequestOutput, ResumedCompletion, SamplingParams
from lamina.scheduler.feature import Feature
from lamina.scheduler.sampling_requests import prompt_logprob_requests_of, sampling_requests_of
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.surviving_kv import StateReports, SurvivingTokens, num_stored_tokens

from .feature import EngineFeature
from .hybrid_model import options_for_model
from .intake import RequestIntake, check_structure
from .request import ActiveRequests, DecodeToken, IncrementalDetokenizer, Request
from .scheduler_factory import PartsBuilder, build_parts, new_memory
from .scheduler_stats import SchedulerStats, collect_stats
from .sessions import EngineSessions
from .vocabulary_delivery import VocabularyDelivery

log = logging.getLogger(__name__)
AnyFeature = TypeVar("AnyFeature", bound=EngineFeature | Feature)


class Engine:
    """Continuous batching over the workers of an ``Executor``. One thread at a time uses it."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Clock = time.monotonic,
        trace: Recorder = NULL_RECORDER,
        features: Iterable[EngineFeature] = (),
        *,
        build: PartsBuilder = build_parts,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        """``features``: called after the engine's own ones. ``build``: makes the scheduler and its features.
        ``vocabulary``: called with the first grammar; None: no request may have one.
        """
        self.executor, self.worker_info = executor, executor.ready
        self.config = config = options_for_model(config, self.worker_info)
        self._clock, self._trace = clock, trace
        parts = build(config, self.worker_info, clock, trace)
        self.accounting, self.scheduler, self.slo_admission = parts.accounting, parts.scheduler, parts.slo_admission
        self.sessions = EngineSessions(self.scheduler, parts.sessions, self.worker_info.max_model_len)
        self.features = (*parts.features, *features)
        self._intake = RequestIntake(config, self.worker_info, self.accounting.num_kv_shards, parts.sessions)
        self.requests = ActiveRequests(clock)
        self.vocabulary = VocabularyDelivery(vocabulary)
        self.in_flight: dict[tuple[int, int], ScheduledStep] = {}  # by batch and step
        self.idle = False  # the last step found nothing to do: requests that are left wait for blocks

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished."""
        return bool(self.requests)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Available KV blocks of each layer group: free blocks, and cached blocks of finished requests."""
        return self.scheduler.available_blocks

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """The counters of the scheduler and of its features."""
        return collect_stats(self.scheduler)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        text: str | None = None,
        make_detokenizer: Callable[[], IncrementalDetokenizer] | None = None,
        resume_from: Iterable[ResumedCompletion] = (),
        external_sampling: bool = False,
        decode_token: DecodeToken | None = None,
        terms: CacheOptions = DEFAULT_CACHE_OPTIONS,
        cacheable: bool = True,
        accepted: bool = False,
    ) -> int:
        """Queue a prompt and return the request's id.

        ``resume_from``: tokens of completions that another engine began; they continue with their seeds.
        ``external_sampling``: ``Request.set_token`` chooses the tokens of the only completion. ``decode_token``: makes
        texts of logprobs. ``cacheable``: its KV stays for later requests, by the options ``terms``. ``accepted``: it
        was admitted before. Raises ValueError for a prompt that cannot be served, and OverloadedError.
        """
        self.check(prompt, params, terms)
        request = self._intake.make(
            prompt,
            params,
            terms,
            self._clock(),
            text=text,
            make_detokenizer=make_detokenizer,
            decode_token=decode_token,
            external_sampling=external_sampling,
            cacheable=cacheable,
            accepted=accepted,
        )
        for feature in () if accepted else self.features:
            if (refusal := feature.refusal(request.sequences, has_token=False)) is not None:
                raise OverloadedError(refusal)
        if terms.session:  # none is made for a refused request
            for sequence in request.sequences:
                sequence.turn.session = self.sessions.get_or_create(terms.session)
        for resumed in resume_from:
            request.replay(resumed)
        self.requests.add(request)  # not one whose tokens could not be taken
        self.idle = False
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.add(sequence)
        return request.id

    def check(self, prompt: list[int], params: SamplingParams, terms: CacheOptions = DEFAULT_CACHE_OPTIONS) -> None:
        """Raise ValueError, in one line, for a prompt or parameters that cannot be served."""
        self._intake.check(prompt, params, terms)
        check_structure(params, has_vocabulary=self.vocabulary.is_available)

    def step(self) -> list[RequestOutput]:
        """Run one pass of the loop. Returns the outputs that grew or ended. Raises WorkerError if a worker is lost for
        good.
        """
        plans = self.scheduler.can_schedule_ahead  # else new requests are not scheduled yet
        steps = self._schedule()
        for feature in self.features if plans else ():
            feature.between_rounds(self)
        self._take(self._run(steps))
        return self.requests.take_outputs()

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """The feature of a class, of the engine or of its scheduler; None if there is none."""
        return next((f for f in (*self.features, *self.scheduler.features) if isinstance(f, kind)), None)

    def request(self, request_id: int) -> Request:
        """An unfinished request. Raises KeyError for another one."""
        return self.requests[request_id]

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its KV is freed with the next step. Returns its output; None for unknown and finished ids."""
        return self.requests.cancel(request_id)

    def release_idle_blocks(self) -> None:
        """Without requests, run steps until there is nothing to do, so that an idle engine holds no blocks."""
        while not self.requests:
            self.step()
            if self.idle:
                break

    def finish_in_flight(self) -> list[RequestOutput]:
        """Wait for the steps in flight, and start none. Returns the outputs that grew. Raises WorkerError."""
        while self.in_flight or self.scheduler.has_transfers:
            self._take(self.executor.wait())
        return self.requests.take_outputs()

    def check_workers(self) -> list[RequestOutput]:
        """Check the workers of an engine without work. Raises WorkerError if one is lost for good."""
        for feature in self.features:
            feature.between_rounds(self)
        self._take(self.executor.check_workers())
        return self.requests.take_outputs()

    def resume(self, ready: ComputeReady) -> None:
        """Continue with workers that have reconnected and kept their KV.

        Raises ValueError while steps are in flight, and if the number of KV blocks has changed.
        """
        if self.in_flight:
            raise ValueError("workers reconnected while steps were in flight: call finish_in_flight first")
        if (ready.num_blocks, ready.kv_shards) != (self.worker_info.num_blocks, self.worker_info.kv_shards):
            raise ValueError(
                f"memory workers had {self.worker_info.num_blocks} KV blocks, and now have {ready.num_blocks}"
            )
        self.scheduler.begin_epoch(ready.epoch, ready.replicas or self.worker_info.replicas)
        self.worker_info = msgspec.structs.replace(self.worker_info, prefill_stores=ready.prefill_stores)
        self.scheduler.resend_penalties()
        self.vocabulary.begin_epoch()
        self.scheduler.features.resume(ready)

    def reset_prefix_cache(self) -> None:
        """Make the KV of finished requests unfindable, also for later engines. Blocks are freed with the next step."""
        self.scheduler.reset_prefix_cache(self.executor.begin_era() if self.worker_info.storage else b"")

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.executor.close()

    def _schedule(self) -> list[ScheduledStep]:
        """The steps of the next round; none if there is no work, or enough steps are in flight."""
        start, steps = self._trace.now(), self.scheduler.schedule()
        for step in steps if self._trace.native_buffer is not None else ():
            self._trace.add(Event.SCHEDULE, start, step.plan, value=step.num_attended_pairs)
        return steps

    def _run(self, steps: list[ScheduledStep]) -> Done | EpochChanged | None:
        """Submit a round. Then wait for the next event, unless another round can be queued first."""
        if steps:
            run = [self._prepare(s) for s in steps]
            words = self.vocabulary.attached(run)
            self.executor.submit(RunRound(round=steps[0].plan.step, steps=run, vocabulary=words))
        for chunk in self.scheduler.take_side_steps():
            if chunk.side_worker is not None:
                part = [self._prepare(chunk)]
                words = self.vocabulary.attached(part, chunk.side_worker)
                new = RunRound(round=chunk.plan.step, steps=part, vocabulary=words)
                self.executor.submit_prefill(chunk.side_worker, new)
        self.idle = not self.in_flight and not self.scheduler.must_wait_for_transfer
        if self.idle:
            return self._look_for_room()
        return None if steps and self.scheduler.can_schedule_ahead else self.executor.wait()

    def _look_for_room(self) -> EpochChanged | Report | None:
        """Without steps in flight, check for new memory workers, since waiting requests may need them."""
        if not self.requests:
            return None
        if (change := self.executor.check_workers()) is not None:
            self.idle = False
            return change
        for feature in self.features:
            if (refusal := feature.on_idle(self)) is not None:
                self.idle = False
                if refusal:
                    request = self.requests[self.scheduler.waiting[0].request_id]
                    request.refuse(refusal)
                    self.requests.mark_grown(request)
                break
        return None

    def _prepare(self, step: ScheduledStep) -> RunStep:
        ends, row, now = {}, 0, self._clock()
        scores: list[SamplingRequest] = []
        for sequence, rows in zip(step.sequences, step.plan.rows, strict=True):
            if rows.first == sequence.num_cached_tokens and (request := self.requests.of(sequence)):
                request.on_scheduled(sequence, now)
            if sequence.params.prompt_logprobs is not None:
                chunk_scores = prompt_logprob_requests_of(sequence, rows.first, rows.count, row)
                scores += chunk_scores
                step.prompt_logprob_requests += [sequence] * len(chunk_scores)
            row += rows.count
            ends[sequence] = row - 1
        draws = [*scores, *sampling_requests_of(step, ends, len(scores))]
        self.in_flight[step.plan.batch, step.plan.step] = step
        return RunStep(plan=step.plan, token_ids=step.tokens, sampling_requests=draws)

    def _take(self, done: Done | EpochChanged | None) -> None:
        """Process an event of the executor."""
        start = self._trace.now()
        if isinstance(done, StepDone):
            self.on_step_done(done)
            self._trace.add(Event.POSTPROCESS, start, done)
        elif isinstance(done, EpochChanged):
            self.on_epoch_changed(done)
        elif done is not None:
            self._on_report(done)

    def on_step_done(self, done: StepDone) -> None:
        step = self.in_flight.pop((done.batch, done.step))
        step.fetch_s = done.fetch_s
        for sequence, drawn in zip(step.prompt_logprob_requests, done.sampled_tokens, strict=False):
            if request := self.requests.of(sequence):
                request.append_prompt_logprob(drawn)
        step.drawn = done.sampled_tokens[len(step.prompt_logprob_requests) :]
        self._append_sampled(zip(step.sampled_sequences, step.drawn, strict=True))
        self.scheduler.on_step_done(step)
        for line in step.warnings:
            log.warning("%s", line)

    def _append_sampled(self, each: Iterable[tuple[Sequence, SampledToken]]) -> None:
        """Append sampled tokens to their requests."""
        of = self.requests.of
        for sequence, drawn in each:
            if sequence.hold_back(drawn):
                continue
            request = of(sequence)
            if request is None or sequence.finished:
                sequence.num_output_placeholders -= 1  # the row was scheduled before the sequence ended
                continue
            request.append(sequence, drawn)
            if not request.is_accepted and request.is_first_token_of(sequence):
                for feature in self.features:
                    if (refusal := feature.refusal([sequence], has_token=True)) is not None:
                        request.refuse_late(refusal)
            self.requests.mark_grown(request)

    def _on_report(self, report: Report) -> None:
        """Process the report of a memory worker that has saved, loaded or scored KV, or failed to."""
        transfer = self.scheduler.on_report(report)
        if transfer is None:
            return
        if transfer.error:
            log.warning("%s", transfer.error)
        if (sequence := transfer.loaded_sequence) is None:
            return
        if not transfer.error:
            early, sequence.early_tokens = sequence.early_tokens, []
            self._append_sampled((sequence, drawn) for drawn in early)
        elif request := self.requests.of(sequence):
            if transfer.is_fatal:
                request.fail(sequence, transfer.error)
                self.requests.mark_grown(request)
            else:
                request.output.num_cached_tokens = None  # reported anew

    def on_epoch_changed(self, change: EpochChanged) -> None:
        """Process finished steps, roll back the others, and continue in the new epoch."""
        now, had = self._clock(), num_stored_tokens(self.scheduler.running)
        met: ComputeReady | EpochChanged = change
        while isinstance(met, EpochChanged):
            for done in met.done:
                self.on_step_done(done)
            met = self.executor.resume(self.roll_back(met))
        self.resume(met)
        again, pause_s = had - num_stored_tokens(self.scheduler.running), self._clock() - now
        log.info("epoch %d: all sequences continue after %.3f s; %d tokens are recomputed", met.epoch, pause_s, again)

    def roll_back(self, change: EpochChanged) -> list[SurvivingKv]:
        for request in self.requests:
            request.roll_back()
        steps, self.in_flight = self.in_flight, {}
        info = self.worker_info
        states = StateReports(info.state_shards, change.state_versions) if info.state_shards else None
        kept = SurvivingTokens(self.accounting, info.holders, change.surviving, states)
        keep = self.scheduler.roll_back(steps.values(), kept.count)
        if change.capacity:
            self.worker_info = msgspec.structs.replace(self.worker_info, **change.capacity._asdict())
            keep = self.scheduler.adopt_memory(new_memory(self.config, self.worker_info, change.new_shards), keep)
        return keep
