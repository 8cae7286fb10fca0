"""Makes sampling requests for compute workers: the next tokens, and log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lamina.protocol.control import LogitsUpdate, Penalties, SamplingRequest

from .scheduler_output import ScheduledStep
from .sequence import Sequence


def sampling_requests_of(
    step: ScheduledStep, last_rows: Mapping[Sequence, int], num_earlier: int
) -> Iterator[SamplingRequest]:
    """Request the next tokens of all sequences of ``step`` that sample, after ``num_earlier`` other requests.

    ``last_rows``: the index of each sequence's last row in the step.
    """
    by_prefill_worker = step.side_worker is not None
    request_index = dict[Sequence, int]()
    if any(sequence.follows is not None for sequence in step.sampled_sequences):
        request_index = {sequence: num_earlier + i for i, sequence in enumerate(step.sampled_sequences)}
    for sequence in step.sampled_sequences:
        followed = sequence.follows
        yield sampling_request_of(
            sequence,
            last_rows[sequence],
            by_prefill_worker=by_prefill_worker,
            reference_request=-1 if followed is None else request_index[followed],
        )


def sampling_request_of(
    sequence: Sequence, row: int, *, by_prefill_worker: bool = False, reference_request: int = -1
) -> SamplingRequest:
    """Request the next token of ``sequence``, after row ``row`` of the step.

    The token is counted in ``num_output_placeholders`` already. ``by_prefill_worker``: the worker does not sample the
    later tokens. ``reference_request``: the request of the sequence that it follows.
    """
    params = sequence.params
    if reference_request >= 0:
        return _plain(sequence, row, reference_request=reference_request)
    pending = sequence.num_output_placeholders
    index = len(sequence.tokens) - len(sequence.prompt) + pending - 1
    # By position, in the order of the fields: it is built for every row of every step.
    return SamplingRequest(
        row,
        sequence.id,
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        sequence.seed,
        index,
        -1 if params.logprobs is None else _alternatives(params.logprobs),
        sorted(sequence.stop_tokens) if index < params.min_tokens else [],
        params.min_p,
        _adjust(sequence, by_prefill_worker=by_prefill_worker) if params.adjusts_logits else None,
        pending > 1,
        -1,
        params.filter_order,
        sequence.external_sampling,
    )


def prompt_logprob_requests_of(sequence: Sequence, first: int, count: int, row: int) -> list[SamplingRequest]:
    """Request log-probabilities of the prompt tokens after positions ``first .. first + count``.

    The first of these has row ``row``. Each is requested once, even if a preempted sequence is recomputed.
    """
    wanted = sequence.params.prompt_logprobs
    if wanted is None or sequence.output.index != 0:
        return []
    start = max(first, sequence.num_scored_prompt_tokens)
    stop = min(first + count, len(sequence.prompt) - 1)
    sequence.num_scored_prompt_tokens = max(stop, sequence.num_scored_prompt_tokens)
    return [
        _plain(sequence, row + position - first, logprobs=_alternatives(wanted), known=sequence.prompt[position + 1])
        for position in range(start, stop)
    ]


def _plain(
    sequence: Sequence, row: int, *, logprobs: int = -1, known: int = -1, reference_request: int = -1
) -> SamplingRequest:
    """Request the log-probabilities of a row without sampling."""
    return SamplingRequest(
        row=row, sequence=sequence.id, temperature=0.0, top_k=0, top_p=1.0, seed=0, output_index=0, logprobs=logprobs,
        prompt_logprob_token=known, reference_request=reference_request,
    )  # fmt: skip


def _alternatives(count: int) -> int:
    """The number of alternatives to request; -1 means all, which a worker limits to its vocabulary."""
    return (1 << 31) - 1 if count == -1 else count


def _adjust(sequence: Sequence, *, by_prefill_worker: bool) -> LogitsUpdate:
    known = -1 if by_prefill_worker else sequence.num_tokens_in_penalties
    if not by_prefill_worker:
        sequence.num_tokens_in_penalties = sequence.num_output_tokens
    tokens = sequence.tokens[len(sequence.prompt) + max(known, 0) :]
    return LogitsUpdate(
        num_known_tokens=max(known, 0), tokens=tokens, penalties=_penalties(sequence) if known < 0 else None
    )


def _penalties(sequence: Sequence) -> Penalties:
    params = sequence.params
    return Penalties(
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
        prompt_token_ids=sorted(set(sequence.prompt)) if params.repetition_penalty != 1.0 else [],
        bad_words_token_ids=params.bad_words_token_ids or [],
        allowed_token_ids=params.allowed_token_ids or [],
        grammar=(params.structured_outputs and params.structured_outputs.compiled) or "",
    )


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of completion ``index``, far from those of requests with neighbouring seeds."""
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 63)
