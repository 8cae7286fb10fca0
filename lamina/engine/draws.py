"""What the compute worker needs to know to sample behind a row, or to report on a token of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lamina.protocol.control import Adjust, Draw, Penalties

from .rounds.steps import ScheduledStep
from .sequence import Sequence, Shadow


def draws_of(step: ScheduledStep, ends: Mapping[Sequence, int], before: int) -> Iterator[Draw]:
    """The next tokens of all sequences of ``step`` that draw, behind ``before`` other draws. ``ends``: their last rows,
    counted in the step.
    """
    behind = {sequence: before + i for i, sequence in enumerate(step.draws)}
    for sequence in step.draws:
        beside = behind[sequence.of] if isinstance(sequence, Shadow) else -1
        yield draw_of(sequence, ends[sequence], apart=step.prefill_worker is not None, beside=beside)


def draw_of(sequence: Sequence, row: int, *, apart: bool = False, beside: int = -1) -> Draw:
    """The next token of ``sequence``, behind row ``row`` of the step; it has been counted in ``num_drawing``.
    ``apart``: by a worker that is not told of its other draws. ``beside``: of a shadow, the draw that it follows.
    """
    params = sequence.params
    if beside >= 0:
        return _plain(sequence, row, beside=beside)
    index = sequence.num_outputs + sequence.num_drawing - 1
    return Draw(
        row=row,
        sequence=sequence.id,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        seed=sequence.seed,
        index=index,
        logprobs=-1 if params.logprobs is None else _alternatives(params.logprobs),
        banned=sorted(sequence.stop_tokens) if index < params.min_tokens else [],
        min_p=params.min_p,
        order=params.filter_order,
        adjust=_adjust(sequence, apart=apart) if params.adjusts_logits else None,
        pending=sequence.num_drawing > 1,
        whole=sequence.held,
    )


def scores_of(sequence: Sequence, first: int, count: int, row: int) -> list[Draw]:
    """Log-probabilities of the prompt's tokens behind positions ``first .. first + count``, whose first row is
    ``row``. Each is asked for once, also where a preempted sequence is computed again.
    """
    wanted = sequence.params.prompt_logprobs
    if wanted is None or sequence.output.index != 0:
        return []
    start = max(first, sequence.num_scored)
    stop = min(first + count, len(sequence.prompt) - 1)
    sequence.num_scored = max(stop, sequence.num_scored)
    return [
        _plain(sequence, row + position - first, logprobs=_alternatives(wanted), known=sequence.prompt[position + 1])
        for position in range(start, stop)
    ]


def _plain(sequence: Sequence, row: int, *, logprobs: int = -1, known: int = -1, beside: int = -1) -> Draw:
    """Behind a row whose token is not to be drawn."""
    return Draw(
        row=row, sequence=sequence.id, temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0, logprobs=logprobs,
        known=known, beside=beside,
    )  # fmt: skip


def _alternatives(count: int) -> int:
    """The alternatives that a draw asks for; -1 stands for all, and a worker has no more than its vocabulary."""
    return (1 << 31) - 1 if count == -1 else count


def _adjust(sequence: Sequence, *, apart: bool) -> Adjust:
    known = -1 if apart else sequence.num_told
    if not apart:
        sequence.num_told = sequence.num_outputs
    tokens = sequence.tokens[len(sequence.prompt) + max(known, 0) :]
    return Adjust(since=max(known, 0), tokens=tokens, start=_penalties(sequence) if known < 0 else None)


def _penalties(sequence: Sequence) -> Penalties:
    params = sequence.params
    return Penalties(
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        bias=params.logit_bias or {},
        prompt=sorted(set(sequence.prompt)) if params.repetition_penalty != 1.0 else [],
        bad_words=params.bad_words_token_ids or [],
        allowed=params.allowed_token_ids or [],
    )


def seed_of(seed: int, index: int) -> int:
    """Of completion ``index``: far from those of other requests, whose seeds are often neighbours."""
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 63)
