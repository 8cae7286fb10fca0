"""The ranks of a replica: they run slice tasks in one order, and draw tokens together.

All ranks run the same slices on their parts of the weights, and combine results inside of them
(``lamina.ops.collective``). Rank 0 leads. If the order of slice tasks depends on when rounds arrive, it names the next
one; it alone draws tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.ops.collective import Collective
from lamina.ops.sampling.sampler import Sampler, num_ranked_before
from lamina.ops.sampling.token_history import LogitChanges
from lamina.protocol.control import RunStep, SampledToken, SamplingRequest

from .compute_worker import SliceTask, SliceTasks

_NOTHING: Mapping[int, LogitChanges] = MappingProxyType({})


class TensorParallelRanks:
    """Several ranks, which share the weights of a replica."""

    def __init__(self, collective: Collective, num_batches: int) -> None:
        """``num_batches``: with a single batch, the order of slice tasks is fixed, and rank 0 need not name them."""
        self._collective = collective
        self._ordered = num_batches > 1
        self._named_by_leader: SliceTask | None = None  # the slice task that rank 0 has named
        self.is_leader = collective.rank == 0
        self._sampler = Sampler()

    def has_next(self, tasks: SliceTasks) -> bool:
        """Return whether a slice task is queued: any one, or the one that rank 0 has named."""
        return bool(tasks) if self._named_by_leader is None else any(task == self._named_by_leader for task, _ in tasks)

    def pop_next(self, tasks: SliceTasks) -> tuple[SliceTask, RunStep] | None:
        """Remove and return the slice task that rank 0 names, the same on all ranks. None if it has not arrived yet.
        Raises ChannelError.
        """
        if not self._ordered:
            return heapq.heappop(tasks)
        if self.is_leader:
            self._collective.broadcast(torch.tensor(tasks[0][0]))
            return heapq.heappop(tasks)
        if self._named_by_leader is None:
            self._named_by_leader = SliceTask(
                *self._collective.broadcast(torch.empty(len(SliceTask._fields), dtype=torch.int64)).tolist()
            )
        index = next((i for i, (task, _) in enumerate(tasks) if task == self._named_by_leader), None)
        if index is None:
            return None
        self._named_by_leader, taken = None, tasks.pop(index)
        heapq.heapify(tasks)
        return taken

    def sample(
        self, logits: Tensor, requests: list[SamplingRequest], seen: Mapping[int, LogitChanges]
    ) -> list[SampledToken]:
        """Draw one token for each row of ``logits`` [len(requests), this rank's vocabulary], the same on all ranks.

        Rank 0 receives each rank's best few logits and those that a request names. It receives all logits only if a
        request samples without ``top_k``, has ``top_p`` before it, or names a large part of the vocabulary. Raises
        ChannelError.
        """
        group, width = self._collective, logits.shape[1]
        candidates = LogitCandidates.needed_for(requests, width, seen)
        if candidates is None:
            whole = group.all_gather(logits.contiguous(), group.size)
        else:
            packed = candidates.pack(logits.float(), requests, seen, group.rank * width, self._sampler)
            whole = candidates.unpack(group.all_gather(packed, group.size), group.size * width)
        asked = any(request.logprobs >= 0 for request in requests)
        lse = self._log_sums(logits.float(), requests) if asked else None
        sampled = self._sampler.sample(whole, requests, seen, lse) if self.is_leader else []
        tokens = (
            torch.tensor([d.token_id for d in sampled])
            if self.is_leader
            else torch.empty(len(requests), dtype=torch.int64)
        )
        token_ids = group.broadcast(tokens).tolist()
        if candidates is not None and asked:
            places = self._token_ranks(logits.float(), whole, token_ids)
            sampled = _with_ranks(sampled, places) if self.is_leader else []
        return sampled or [SampledToken(d.sequence, token) for d, token in zip(requests, token_ids, strict=True)]

    def _log_sums(self, raw: Tensor, requests: list[SamplingRequest]) -> Tensor:
        """Return log-sum-exp over all ranks, [n] fp32, for each row whose request wants scores; 0 for other rows. Each
        rank sums its own part, independently of what other requests need of the logits, so no bit depends on them.
        """
        parts = self._collective.all_gather(_row_sums(raw, requests)[:, None].contiguous(), self._collective.size)
        return _row_sums(parts, requests)

    def _token_ranks(self, raw: Tensor, known: Tensor, tokens: list[int]) -> list[int]:
        """Return the places of ``tokens`` among all tokens, from 1. ``raw`` [n, width] fp32: this rank's logits.
        ``known`` [n, vocabulary]: has those of ``tokens``.
        """
        group, width = self._collective, raw.shape[1]
        chosen = torch.tensor(tokens).clamp_min(0)[:, None]
        values = known.gather(1, chosen.to(known.device))
        processed = num_ranked_before(raw, (chosen - group.rank * width).to(raw.device), values.to(raw.device))
        everywhere = group.all_gather(processed.float()[:, None].contiguous(), group.size)  # exact below 2^24
        return [int(count) + 1 for count in everywhere.sum(1).tolist()]


def _with_ranks(sampled: list[SampledToken], places: list[int]) -> list[SampledToken]:
    """Return the same tokens, each with its place among all tokens by log-probability."""
    return [
        SampledToken(d.sequence, d.token_id, [(*d.logprobs[0][:2], place), *d.logprobs[1:]]) if d.logprobs else d
        for d, place in zip(sampled, places, strict=True)
    ]


def _row_sums(values: Tensor, requests: list[SamplingRequest]) -> Tensor:
    """Return log-sum-exp of the rows whose requests want scores. Rows are summed one by one, since torch sums a single
    row in another order.
    """
    sums = values.new_zeros(len(values))
    for i, request in enumerate(requests):
        if request.logprobs >= 0:
            sums[i] = values[i].logsumexp(0)
    return sums


class LogitCandidates(NamedTuple):
    """The logits of each rank that a step's requests need: the ``num_best`` highest that masks leave, ``num_named``
    named by a request, and the ``num_reported`` highest of all, for log-probabilities.
    """

    num_best: int
    num_named: int
    num_reported: int = 0

    @staticmethod
    def needed_for(
        requests: list[SamplingRequest], width: int, seen: Mapping[int, LogitChanges] = _NOTHING
    ) -> LogitCandidates | None:
        """Return the fewest candidates that serve all ``requests``; None if they need all logits. ``width``: of one
        rank's logits.
        """
        best, named, reported = 1, 0, 0
        for request in requests:
            of_few = request.prompt_logprob_token >= 0 or request.temperature == 0.0 or _of_allowed(request, seen)
            if (
                request.return_logits
                or request.reference_request >= 0
                or not (of_few or (request.top_k and not _shares_all(request)))
            ):
                return None
            names = _named(request, seen)
            # Penalties may move the best tokens below as many others as they name.
            others = 1 if _of_allowed(request, seen) else request.top_k + len(names) + 1
            if _is_masked(request, seen):
                reported = max(reported, request.logprobs)
            best = max(best, others, request.logprobs)
            named = max(named, len(names))
        return LogitCandidates(best, named, reported) if best + named + reported < width / 2 else None

    def pack(
        self,
        raw: Tensor,
        requests: list[SamplingRequest],
        seen: Mapping[int, LogitChanges],
        first: int,
        sampler: Sampler,
    ) -> Tensor:
        """Pack raw [n, width] fp32, of tokens from ``first`` on, into [n, 2 * (best + named + reported)] fp32. The
        first half has values, the second half the ids of their tokens (exact below 2^24).
        """
        masked = _masked(raw, requests, seen, first)
        best = sampler.top_tokens(masked, self.num_best)  # the lowest ids of equal values, as sampling prefers them
        named = best[:, :1].repeat(1, self.num_named)
        for row, request in zip(named, requests, strict=True):
            own = [i - first for i in _named(request, seen) if 0 <= i - first < raw.shape[1]]
            row[: len(own)] = torch.tensor(own, dtype=row.dtype)
        ids = torch.cat([best, named], 1)
        if self.num_reported:
            ids = torch.cat([ids, sampler.top_tokens(raw, self.num_reported)], 1)
        return torch.cat([raw.gather(1, ids), (ids + first).float()], 1)

    def unpack(self, packed: Tensor, vocabulary: int) -> Tensor:
        """Return the packed logits of all ranks as logits [n, vocabulary]; unknown ones are minus infinity."""
        count = self.num_best + self.num_named + self.num_reported
        parts = packed.view(len(packed), -1, 2 * count)
        values, ids = parts[..., :count], parts[..., count:].long()
        logits = packed.new_full((len(packed), vocabulary), float("-inf"))
        return logits.scatter_(1, ids.flatten(1), values.flatten(1))


def _shares_all(request: SamplingRequest) -> bool:
    """Return whether top_p is a share of the probability of all tokens, not only of those that top_k leaves."""
    return request.top_p < 1.0 and request.filter_order.index("top_p") < request.filter_order.index("top_k")


def _named(request: SamplingRequest, seen: Mapping[int, LogitChanges]) -> list[int]:
    """Return the tokens whose logits the request needs, however low they are."""
    tokens = {*request.banned_token_ids, *([request.prompt_logprob_token] if request.prompt_logprob_token >= 0 else [])}
    if request.logits_update is not None:
        history = seen[request.sequence]
        if (few := _few_allowed(history)) is not None:
            return few
        tokens |= {*history.penalties.logit_bias, *history.tokens.tolist(), *history.banned_token_ids}
    return sorted(tokens)


def _of_allowed(request: SamplingRequest, seen: Mapping[int, LogitChanges]) -> bool:
    """Return whether the request allows only tokens that it names."""
    return request.logits_update is not None and _few_allowed(seen[request.sequence]) is not None


def _is_masked(request: SamplingRequest, seen: Mapping[int, LogitChanges]) -> bool:
    """Return whether the request has masks, and none of them names its tokens."""
    return (
        request.logits_update is not None
        and bool(seen[request.sequence].masks)
        and _few_allowed(seen[request.sequence]) is None
    )


def _masked(raw: Tensor, requests: list[SamplingRequest], seen: Mapping[int, LogitChanges], first: int) -> Tensor:
    """Return ``raw`` [n, width], of tokens from ``first`` on, without the logits that masks forbid."""
    rows = [row for row, request in enumerate(requests) if _is_masked(request, seen)]
    if not rows:
        return raw
    masked = raw.clone()
    for row in rows:
        for mask in seen[requests[row].sequence].masks:
            mask.apply(masked[row], first)
    return masked


def _few_allowed(changes: LogitChanges) -> list[int] | None:
    """Return the tokens of the smallest mask that names its tokens; None if no mask does."""
    named = [mask.few_token_ids for mask in changes.masks if mask.few_token_ids is not None]
    return min((sorted(ids) for ids in named), key=len, default=None)
