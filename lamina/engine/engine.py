"""The engine: schedule, run, take. One thread calls it; requests come and go between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.control import ComputeReady, RunRound, RunStep, SampledToken, SamplingRequest, StepDone
from lamina.protocol.executor import Clock, Done, EpochChanged, Executor, Report
from lamina.protocol.step_plan import SurvivingKv
from lamina.request import RequestOutput, ResumedCompletion, SamplingParams
from lamina.scheduler.sampling_requests import prompt_logprob_requests_of, sampling_requests_of
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionName, Sessions
from lamina.scheduler.surviving_kv import SurvivingTokens, num_stored_tokens

from .feature import EngineFeature
from .intake import RequestIntake
from .request import ActiveRequests, DecodeToken, IncrementalDetokenizer, Request
from .scheduler_factory import (
    build_engine_features,
    build_prefix_cache,
    build_scheduler,
    build_slo_admission,
    drop_session,
    new_block_tables,
    refresh_prefill_stores,
)

log = logging.getLogger(__name__)
AnyFeature = TypeVar("AnyFeature", bound=EngineFeature)


class Engine:
    """Continuous batching over the workers of an ``Executor``. One thread at a time uses it."""

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Clock = time.monotonic,
        trace: Recorder = NULL_RECORDER,
        features: Iterable[EngineFeature] = (),
        *,
        keeps_slo: bool = True,
    ) -> None:
        """``features``: asked after the engine's own ones. ``keeps_slo``: ``slo_admission`` may get limits."""
        self.config, self.executor, self.worker_info = config, executor, executor.ready
        self._clock, self._trace = clock, trace
        self.accounting = new_block_tables(self.worker_info)
        self.sessions = Sessions()
        prefixes = build_prefix_cache(config, self.accounting, self.sessions, clock)
        self.slo_admission = build_slo_admission(config, self.worker_info, prefixes, clock, trace)
        conducts = keeps_slo or config.topology.prefill_workers > 0 or self.slo_admission.decision_log is not None
        self.scheduler = build_scheduler(
            config,
            self.worker_info,
            self.accounting,
            self.slo_admission,
            prefixes,
            conducts=conducts,
            scheduler_class=self.scheduler_class,
        )
        own = build_engine_features(config, self.scheduler, self.slo_admission, conducts=conducts)
        self.features = (*own, *features)
        self._intake = RequestIntake(config, self.worker_info, self.accounting.num_kv_shards, self.sessions)
        self.requests = ActiveRequests(clock)
        self.in_flight: dict[tuple[int, int], ScheduledStep] = {}  # by batch and step
        self.idle = False  # whether the last pass of the loop found nothing to do: what is left waits for its caller

    @property
    def has_work(self) -> bool:
        """Whether some request is unfinished."""
        return bool(self.requests)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """KV blocks of each layer group that sequences can still have: free ones, and those of finished ones."""
        return self.scheduler.available_blocks

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

        ``resume_from``: tokens of completions that another engine began; they continue with the seed that they had.
        ``external_sampling``: ``Request.set_token`` chooses the tokens of its only completion. ``decode_token``: for
        logprobs. ``cacheable``: its KV serves other requests after its end, on these ``terms``.
        Raises ValueError for a prompt that cannot be served and, unless it was ``accepted`` before, OverloadedError.
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
        )
        for feature in self.features:
            feature.on_arrival(request.sequences, accepted=accepted)
        if terms.session:  # none is made for a refused request
            for sequence in request.sequences:
                sequence.session = self.sessions.get_or_create(terms.session)
        for resumed in resume_from:
            request.replay(resumed)
        self.requests.add(request)  # not one whose tokens could not be taken
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.add(sequence)
        return request.id

    def check(self, prompt: list[int], params: SamplingParams, terms: CacheOptions = DEFAULT_CACHE_OPTIONS) -> None:
        """Raises ValueError, in one line, for a prompt or parameters that cannot be served."""
        self._intake.check(prompt, params, terms)

    def step(self) -> list[RequestOutput]:
        """One pass of the loop; returns the requests that got tokens or ended. Raises WorkerError if a worker is lost
        for good.
        """
        plans = self.scheduler.can_schedule_ahead  # else requests that have come are not looked at yet
        steps = self._schedule()
        for feature in self.features if plans else ():
            feature.after_schedule(self)
        self._take(self._run(steps))
        return self.requests.take_outputs()

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """The engine's feature of a kind, if there is one."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def request(self, request_id: int) -> Request:
        """An unfinished request. Raises KeyError for another one."""
        return self.requests[request_id]

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its KV is freed with the next step. What became of it; None for unknown and finished ids."""
        return self.requests.cancel(request_id)

    def release_idle_blocks(self) -> None:
        """Where no request is left, take in what is in flight and free its blocks: an idle engine holds none."""
        while not self.requests and (self.scheduler.num_running or self.in_flight or self.scheduler.has_pending_ops):
            self.step()
        if not self.requests:
            self.scheduler.drop_cancelled()

    def finish_in_flight(self) -> list[RequestOutput]:
        """Take in what is in flight and begin nothing; returns the requests that got tokens. Raises WorkerError."""
        while self.in_flight or self.scheduler.has_transfers:
            self._take(self.executor.wait())
        return self.requests.take_outputs()

    def check_workers(self) -> list[RequestOutput]:
        """Of an engine without work: whether its workers live. Raises WorkerError when one is lost for good."""
        for feature in self.features:
            feature.after_schedule(self)
        self._take(self.executor.check_workers())
        return self.requests.take_outputs()

    def resume(self, ready: ComputeReady) -> None:
        """Go on with workers that have met anew, and have kept their KV. Raises ValueError while steps are in flight,
        and where the capacity is another one than before.
        """
        if self.in_flight:
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

    def _schedule(self) -> list[ScheduledStep]:
        """The steps of the next round; none if there is nothing to do, or enough of it in flight."""
        start, steps = self._trace.now(), self.scheduler.schedule()
        for step in steps if self._trace.native_buffer is not None else ():
            self._trace.add(Event.SCHEDULE, start, step.plan, value=step.num_attended_pairs)
        return steps

    def _run(self, steps: list[ScheduledStep]) -> Done | EpochChanged | None:
        """Send a round off. Then wait for what happens next, unless another round can be queued first."""
        if steps:
            self.executor.submit(RunRound(round=steps[0].plan.step, steps=[self._prepare(s) for s in steps]))
        for chunk in self.scheduler.take_prefill_steps():
            if chunk.prefill_worker is not None:
                new = RunRound(round=chunk.plan.step, steps=[self._prepare(chunk)])
                self.executor.submit_prefill(chunk.prefill_worker, new)
        self.idle = not self.in_flight and not self.scheduler.must_wait_for_transfer
        if self.idle:
            return self._look_for_room()
        return None if steps and self.scheduler.can_schedule_ahead else self.executor.wait()

    def _look_for_room(self) -> EpochChanged | None:
        """With nothing to wait for: memory workers that come may be all that the requests need."""
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
                for feature in self.features:
                    feature.on_first_rows(sequence)
            chunk_scores = prompt_logprob_requests_of(sequence, rows.first, rows.count, row)
            scores += chunk_scores
            step.prompt_logprob_requests += [sequence] * len(chunk_scores)
            row += rows.count
            ends[sequence] = row - 1
        draws = [*scores, *sampling_requests_of(step, ends, len(scores))]
        self.in_flight[step.plan.batch, step.plan.step] = step
        return RunStep(plan=step.plan, token_ids=step.tokens, sampling_requests=draws)

    def _take(self, done: Done | EpochChanged | None) -> None:
        """Take in what has happened."""
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
        if finished := self.scheduler.on_step_done(step):
            for feature in self.features:
                feature.on_round_done(finished)
        for line in step.warnings:
            log.warning("%s", line)

    def _append_sampled(self, each: Iterable[tuple[Sequence, SampledToken]]) -> None:
        """Give drawn tokens to their requests."""
        for sequence, drawn in each:
            if sequence.hold_back(drawn):
                continue
            request = self.requests.of(sequence)
            if sequence.finished or request is None:
                sequence.num_output_placeholders -= 1  # a row that turned out to be one too many
                continue
            request.append(sequence, drawn)
            if request.is_first_token_of(sequence):
                for refusal in (feature.on_first_token(sequence) for feature in self.features):
                    if refusal is not None:
                        request.refuse_late(refusal)
            self.requests.mark_grown(request)

    def _on_report(self, report: Report) -> None:
        """A memory worker has saved, loaded or scored KV, or has not."""
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
            if self.config.offload.kv_load_failure_policy == "recompute":
                request.output.num_cached_tokens = None  # reported anew
            else:
                request.fail(sequence, transfer.error)
                self.requests.mark_grown(request)

    def on_epoch_changed(self, change: EpochChanged) -> None:
        """Take in what was done, take back what was not, and go on under another epoch."""
        now, had = self._clock(), num_stored_tokens(self.scheduler.running)
        met: ComputeReady | EpochChanged = change
        while isinstance(met, EpochChanged):
            for done in met.done:
                self.on_step_done(done)
            met = self.executor.resume(self.roll_back(met))
        self.resume(met)
        again, pause_s = had - num_stored_tokens(self.scheduler.running), self._clock() - now
        log.info("epoch %d: all sequences go on after %.3f s; %d tokens are computed again", met.epoch, pause_s, again)

    def roll_back(self, change: EpochChanged) -> list[SurvivingKv]:
        for request in self.requests:
            request.roll_back()
        steps, self.in_flight = self.in_flight, {}
        kept = SurvivingTokens(self.accounting, self.worker_info.holders, change.surviving)
        keep = self.scheduler.roll_back(steps.values(), kept.count)
        if change.capacity:
            self.worker_info = msgspec.structs.replace(self.worker_info, **change.capacity._asdict())
            keep = self.scheduler.adopt_blocks(new_block_tables(self.worker_info), keep, change.new_shards)
        return keep
