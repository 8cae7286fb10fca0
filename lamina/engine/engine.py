"""The engine: schedule, run, postprocess. One thread calls it; requests come and go between steps."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable

import msgspec

from lamina.observe.trace import OFF, Event, Recorder
from lamina.protocol.control import ComputeReady, Draw, Drawn, RunRound, RunStep, StepDone
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.plan import Keep
from lamina.request import Blame, CompletionOutput, RequestOutput, RequestTimes, SamplingParams, Told

from .blocks.under_way import Moved
from .checks import check_discard, check_ids, check_stops, check_terms, is_sparse, kv_form, too_long
from .configured import blocks_of, promises_of, renew_stores, scheduler_of
from .conversations.overflow import overflow_of
from .conversations.ranges import Ranges, joined, without
from .conversations.sessions import SessionName
from .conversations.terms import PLAIN, KVTerms
from .draws import draws_of, scores_of, seed_of
from .kept import KeptKV, num_stored
from .request import Request
from .rounds.early import EarlyDraws
from .rounds.steps import ScheduledStep
from .scheduler import Scheduler
from .sequence import Sequence, Shadow
from .text import Pieces, Spell, texts_of
from .timing import Timing
from .tuning.tuner import Tuner
from .wire import Clock, Done, Report, ViewChanged, Wire

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over the workers of a ``Wire``. One thread at a time uses it."""

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(self, wire: Wire, config: EngineConfig, clock: Clock = time.monotonic, trace: Recorder = OFF) -> None:
        self.config, self.wire, self.info = config, wire, wire.ready
        self._clock, self._trace = clock, trace
        self._ledger = blocks_of(self.info)
        self._tuner: Tuner | None = None
        num_batches = 1 if config.topology.plans else config.topology.most_batches
        self.promises = promises_of(config, clock, trace)
        self.scheduler = scheduler_of(
            config, self.info, self._ledger, num_batches, self.promises, clock, self.scheduler_class
        )
        stripe = self.info.stripe * self.info.block_size * self._ledger.num_lanes
        self._overflow = overflow_of(config.overflow, self.info.max_model_len, stripe)
        self._timing = Timing(self.scheduler.swaps, self.promises)
        self._steps: dict[tuple[int, int], ScheduledStep] = {}  # in flight, by batch and step
        self._early, self._seeds = EarlyDraws(), random.Random(config.batching.seed)
        self._next_round = self._next_request = 0
        self.idle = False  # whether the last pass of the loop found nothing to do: what is left waits for its caller
        self.hope: Callable[[], str | None] = lambda: None  # for room, when idle: "" = some may come; else why none
        self._requests, self._caught_up = dict[int, Request](), list[int]()

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
        make_pieces: Callable[[], Pieces] | None = None,
        told: Iterable[Told] = (),
        held: bool = False,
        spell: Spell | None = None,
        terms: KVTerms = PLAIN,
        kept: bool = True,
        accepted: bool = False,
    ) -> int:
        """Queue a prompt; returns the request's id. ``told``: of completions that another engine began; they go on
        behind that, given the seed that they had. ``held``: its tokens are chosen by ``choose``, not drawn; it has one
        completion. ``spell``: for logprobs. ``kept``: its KV serves others behind its end, on these ``terms``. Raises
        ValueError for a prompt that cannot be served and, unless it was ``accepted`` before, OverloadedError.
        """
        self.check(prompt, params, terms)
        request_id, self._next_request = self._next_request, self._next_request + 1
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        known = self.scheduler.sessions.named(terms.session) if terms.session else None
        given, discarded = prompt, Ranges()
        if self._overflow and params.prompt_logprobs is None and not held:
            before = joined([*(known.discarded if known else ()), *terms.discard])
            discarded = self._overflow.discarded(len(prompt), params.max_tokens, before)
            prompt = without(prompt, discarded)
        sequences = [self._sequence(request_id, prompt, params, seed_of(seed, i), i) for i in range(params.n)]
        for sequence in sequences:
            sequence.held, sequence.discarded, sequence.outlived = held, discarded, not kept
            sequence.given = given if discarded else []
            sequence.kin, sequence.retention_s, sequence.priority = terms.kin, terms.retention_s, terms.priority
            sequence.salt, sequence.sparse, sequence.dense = kv_form(terms.salt, params, self.config)
        self.promises.check(sequences, self.scheduler.most_sequences, accepted=accepted)
        if terms.session:  # none is made for who is refused
            for sequence in sequences:
                sequence.session = self.scheduler.sessions.of(terms.session)
        outputs, times = [s.output for s in sequences], RequestTimes(self._clock())
        output = RequestOutput(request_id, text, list(given), outputs, times)
        output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        request = Request(output, sequences, texts_of(params, make_pieces), spell)
        for one in told:
            self._catch_up(request, one)
        self._requests[request_id] = request  # not one whose tokens could not be taken
        if output.finished:  # by what was told, such as under a smaller --max-model-len
            self._caught_up.append(request_id)
        for sequence in sequences:
            if not sequence.finished:
                self.scheduler.add(sequence)
        return request_id

    def _catch_up(self, request: Request, told: Told) -> None:
        """Take the tokens of one completion as if they were drawn now. The prompt's scores were told with the first."""
        sequence = request.sequences[told.index]
        if told.index == 0 and told.tokens:
            request.output.prompt_logprobs, sequence.num_scored = None, len(sequence.prompt) - 1
        for token in told.tokens:
            sequence.num_drawing += 1
            request.append(sequence, Drawn(sequence.id, token))

    def check(self, prompt: list[int], params: SamplingParams, terms: KVTerms = PLAIN) -> None:
        """Raises ValueError, in one line, for a prompt or parameters that cannot be served."""
        limit, vocab = self.info.max_model_len, self.info.vocab_size
        check_terms(terms, params, self.config)
        if terms.discard:
            check_discard(terms.discard, len(prompt), params, self._overflow)
        if not prompt:
            raise ValueError("the decoder prompt cannot be empty: it needs at least one token")
        if len(prompt) >= limit and (self._overflow is None or params.prompt_logprobs is not None):
            raise ValueError(too_long(len(prompt), limit))
        check_ids(prompt, params, vocab)
        is_sparse(params, self.config)
        check_stops(params, self._stops(params), vocab)

    def step(self) -> list[RequestOutput]:
        """One pass of the loop; returns the requests that got tokens. Raises WorkerError when a worker is lost."""
        if self._caught_up:
            ended, self._caught_up = self._caught_up, []
            return self._ended(self._requests[i] for i in ended if i in self._requests)
        start, steps = self._trace.now(), self.scheduler.schedule()
        self.idle = not steps and not self._steps and not self.scheduler.awaits_transfer
        if self.idle and self._requests:
            if (change := self.wire.look()) is not None:  # memory workers that come may be all that is waited for
                self.idle = False
                return self._change(change)
            if (said := self.hope()) is not None:
                self.idle = False
                return self._refuse(said) if said else []
        for step in steps if self._trace.native is not None else ():
            self._trace.add(Event.SCHEDULE, start, step.plan, value=step.pairs)
        done, start = self._run(steps), self._trace.now()
        outputs = self._take(done)
        if isinstance(done, StepDone):
            self._trace.add(Event.POSTPROCESS, start, done)
        return outputs

    def logits_of(self, request_id: int) -> bytes:
        """Of a held request, behind its last token: see Drawn. Empty until they have come."""
        request = self._requests[request_id]
        return request.logits if request.sequences[0].awaits_choice else b""

    def choose(self, request_id: int, token: int) -> None:
        """The next token of a held request whose logits have come. Raises ValueError for one that is no token."""
        if not 0 <= token < self.info.vocab_size:
            raise ValueError(f"token id {token} is out of vocabulary: it has {self.info.vocab_size} tokens")
        request = self._requests[request_id]
        request.sequences[0].choose(token)
        request.output.outputs[0].token_ids.append(token)
        if request.output.finished:
            del self._requests[request_id]

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its KV is freed with the next step. What became of it; None for unknown and finished ids."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            request.end(sequence, "abort")
        request.output.times.finished_s = self._clock()
        return request.output

    def settle(self) -> None:
        """Where no request is left, take in what is in flight and free its blocks: an idle engine holds none."""
        while not self._requests and (self.scheduler.num_running or self._steps or self.scheduler.owes):
            self.step()
        if not self._requests:
            self.scheduler.forget_finished()

    def rest(self) -> list[RequestOutput]:
        """Take in what is in flight and begin nothing; returns the requests that got tokens. Raises WorkerError."""
        touched = dict[int, RequestOutput]()
        while self._steps or self.scheduler.moving:
            touched |= {output.request_id: output for output in self._take(self.wire.wait())}
        return list(touched.values())

    def look(self) -> list[RequestOutput]:
        """Of an engine without work: whether its workers live. Raises WorkerError when one is lost for good."""
        change = self.wire.look()
        return [] if change is None else self._change(change)

    def resume(self, ready: ComputeReady) -> None:
        """Go on with workers that have met anew, and have kept their KV. Raises ValueError while steps are in flight,
        and where the capacity is another one than before.
        """
        if self._steps:
            raise ValueError("workers met anew while steps were in flight: rest first")
        if (ready.num_blocks, ready.lanes) != (self.info.num_blocks, self.info.lanes):
            raise ValueError(f"memory workers had {self.info.num_blocks} KV blocks, and now have {ready.num_blocks}")
        self.scheduler.view, self.scheduler.num_replicas = ready.view, ready.replicas or self.info.replicas
        self.info = renew_stores(self.scheduler, self.config, self.info, ready.stores)
        self.scheduler.tell_anew()
        if self.scheduler.tier and ready.tier:
            self.scheduler.tier.learn(ready.tier, ready.holders)

    def reset_prefix_cache(self) -> None:
        """Find no KV of finished requests any more, here or in a later engine; blocks are free with the next step."""
        self.scheduler.forget_prefixes(self.wire.begin_era() if self.scheduler.tier else b"")
        self.scheduler.prefill.forget_prompts()

    def drop_session(self, name: SessionName) -> bool:
        """Forget a session and give up its KV, but for what others have too; the blocks are free with the next step,
        or once the engine settles. False: there is no such session.
        """
        return self.scheduler.drop_session(name)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.wire.close()

    def _sequence(self, request_id: int, prompt: list[int], params: SamplingParams, seed: int, index: int) -> Sequence:
        limit = self.info.max_model_len
        max_len = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
        output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        return Sequence(request_id, params, seed, list(prompt), output, max_len, self._stops(params))

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        eos = [] if params.ignore_eos else self.info.eos_token_ids
        return frozenset([*eos, *(params.stop_token_ids or [])])

    def _change(self, change: ViewChanged) -> list[RequestOutput]:
        """Take in what was done, take back what was not, and go on under another view; the requests that got tokens."""
        touched, now = dict[int, RequestOutput](), self._clock()
        had = num_stored(self.scheduler.running)
        met: ComputeReady | ViewChanged = change
        while isinstance(met, ViewChanged):
            for done in met.done:
                touched |= {output.request_id: output for output in self._postprocess(done)}
            met = self.wire.resume(self._roll_back(met))
        self.resume(met)
        again, pause_s = had - num_stored(self.scheduler.running), self._clock() - now
        log.info("view %d: all sequences go on after %.3f s; %d tokens are computed again", met.view, pause_s, again)
        return list(touched.values())

    def _roll_back(self, change: ViewChanged) -> list[Keep]:
        for request in self._requests.values():
            scores = request.output.prompt_logprobs
            if scores is not None:
                request.sequences[0].num_scored = len(scores) - 1
        steps, self._steps = self._steps, {}
        self._early.forget()
        self._timing.forget()
        kept = KeptKV(self._ledger, self.info.holders, change.kept)
        keep = self.scheduler.roll_back(steps.values(), kept.tokens)
        if change.capacity:
            self.info = msgspec.structs.replace(self.info, **change.capacity._asdict())
            keep = self.scheduler.lay_out(blocks_of(self.info), keep, change.stays)
        return keep

    def _take(self, done: Done | ViewChanged | None) -> list[RequestOutput]:
        if isinstance(done, ViewChanged):
            return self._change(done)
        return self._postprocess(done) if isinstance(done, StepDone | None) else self._moved(done)

    def _moved(self, said: Report) -> list[RequestOutput]:
        """A memory worker has saved, loaded or scored KV, or has not; the requests that got tokens or ended by that."""
        transfer = self.scheduler.moved(said)
        if transfer is None or transfer.loaded is None:
            return self._failed(transfer) if transfer is not None and transfer.error else []
        self._timing.loaded(transfer.loaded, self._clock())
        counts = self._early.end(transfer.loaded, failed=bool(transfer.error))
        return self._failed(transfer) if transfer.error else self._draw(counts)

    def _failed(self, transfer: Moved) -> list[RequestOutput]:
        log.warning("%s", transfer.error)
        request = self._requests.get(transfer.loaded.request_id) if transfer.loaded else None
        if transfer.loaded is None or request is None or self.config.tier.kv_load_failure_policy == "recompute":
            if request is not None:
                request.output.num_cached_tokens = None  # to be told anew
            return []
        request.output.outputs[transfer.loaded.output.index].blame = Blame.SERVER
        request.end(transfer.loaded, "error", transfer.error)
        return self._ended([request])

    def _refuse(self, why: str) -> list[RequestOutput]:
        """The request that is to run next ends."""
        request = self._requests[self.scheduler.waiting[0].request_id]
        request.refuse(why)
        return self._ended([request])

    def _ended(self, touched: Iterable[Request]) -> list[RequestOutput]:
        now, outputs = self._clock(), list[RequestOutput]()
        for request in touched:
            finished = request.output.finished
            request.output.times.mark(now, finished=finished)
            if finished:
                request.output.num_preemptions = sum(s.num_preemptions for s in request.sequences)
                del self._requests[request.output.request_id]
            outputs.append(request.output)
        return outputs

    def _run(self, steps: list[ScheduledStep]) -> Done | ViewChanged | None:
        """Send a round off; then wait for the next step that is done, unless another round can be queued first."""
        if steps:
            self.wire.submit(RunRound(round=self._next_round, steps=[self._prepare(s) for s in steps]))
            self._next_round += 1
            self._timing.sent(steps, self._clock())
        for chunk in self.scheduler.take_chunks():
            if chunk.prefill_worker is not None:
                new = RunRound(round=chunk.plan.step, steps=[self._prepare(chunk)])
                self.wire.prefill(chunk.prefill_worker, new)
        waits = self._steps or self.scheduler.awaits_transfer
        if not waits or (steps and self.scheduler.may_run_ahead):
            return None
        return self.wire.wait()

    def _prepare(self, step: ScheduledStep) -> RunStep:
        ends, row, now = {}, 0, self._clock()
        scores: list[Draw] = []
        for sequence, rows in zip(step.parts, step.plan.rows, strict=True):
            if rows.first == sequence.num_cached and (request := self._requests.get(sequence.request_id)):
                request.begin(sequence, now)
                self.promises.began_inline(sequence)
            chunk_scores = scores_of(sequence, rows.first, rows.count, row)
            scores += chunk_scores
            step.scores += [sequence] * len(chunk_scores)
            row += rows.count
            ends[sequence] = row - 1
        draws = [*scores, *draws_of(step, ends, len(scores))]
        self._steps[step.plan.batch, step.plan.step] = step
        return RunStep(plan=step.plan, tokens=step.tokens, draws=draws)

    def _postprocess(self, done: StepDone | None) -> list[RequestOutput]:
        if done is None:
            return []
        step, now = self._steps.pop((done.batch, done.step)), self._clock()
        step.fetch_s = done.fetch_s
        for sequence, drawn in zip(step.scores, done.drawn, strict=False):
            if request := self._requests.get(sequence.request_id):
                request.add_score(drawn)
        outputs = self._draw(zip(step.draws, done.drawn[len(step.scores) :], strict=True))
        finished = self.scheduler.complete(step)
        if finished:
            self._timing.done(step.plan.step, finished, now)
        if finished and self._tuner and self._tuner.observe(finished):
            self.follow(self._tuner)
        return outputs

    def _draw(self, each: Iterable[tuple[Sequence, Drawn]]) -> list[RequestOutput]:
        """Take drawn tokens in; the requests that got some."""
        touched, shadows = {}, self.scheduler.shadows
        for sequence, drawn in each:
            if isinstance(sequence, Shadow) and shadows and (why := shadows.take(sequence, drawn)):
                log.warning("--kv-error-budget: %s", why)
            if self._early.take(sequence, drawn):
                continue
            request = self._requests.get(sequence.request_id)
            if sequence.finished or request is None:
                sequence.num_drawing -= 1  # a row that turned out to be one too many
                continue
            request.append(sequence, drawn)
            if request.has_begun_with(sequence) and (refusal := self.promises.refuses_decoding(sequence)):
                request.refuse_late(refusal)
            touched[sequence.request_id] = request
        return self._ended(touched.values())

    def follow(self, tuner: Tuner) -> None:
        """Have it say how many batches take turns."""
        self._tuner, self.info.summary["plan"] = tuner, tuner.reason
        self.scheduler.regroup(tuner.n)
