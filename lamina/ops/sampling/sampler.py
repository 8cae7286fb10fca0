"""The sampling of a step: penalties and bans, the tokens, and the log-probabilities that are requested of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from lamina.protocol.control import ALL_TOKENS_BANNED, NO_TOKEN, SampledToken, SamplingRequest
from lamina.request import Score

from . import Backend, SampleSpec
from .sampling_settings import sampler_settings
from .token_history import LogitChanges
from .token_mask import TokenMask, forbid
from .torch_sampling import TorchSampling

log = logging.getLogger(__name__)
_NOTHING: Mapping[int, LogitChanges] = MappingProxyType({})
_NATIVE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Sampler:
    """Draws tokens; each worker that draws has one."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: on a CPU; None for as many as torch has."""
        self._plain = TorchSampling()
        self._native = _open_native(threads or torch.get_num_threads())

    def sample(
        self,
        logits: Tensor,
        draws: list[SamplingRequest],
        seen: Mapping[int, LogitChanges] = _NOTHING,
        lse: Tensor | None = None,
    ) -> list[SampledToken]:
        """Draw one token for each row, or return its logits if a request wants them all. logits [len(draws), V], any
        float dtype.

        NO_TOKEN if the largest logit is NaN or infinite; ALL_TOKENS_BANNED if it is finite and bans leave no finite
        one. ``seen``: what requests with a ``logits_update`` count, by sequence. ``lse``: of each row, the log-sum-exp
        of all logits, if ``logits`` lack some.

        Bias, penalties and bans come first, in fp32; then see lamina.ops.sampling. Greedy takes the first rank. Raises
        ValueError for parameters out of range.
        """
        tokens = [0 if d.return_logits or d.reference_request >= 0 else d.prompt_logprob_token for d in draws]
        due, size = [i for i, token in enumerate(tokens) if token < 0], logits.shape[-1]
        masks = {i: bits for i in due if (bits := _mask_alone(draws[i], seen, size)) is not None}
        changed = [
            i for i in due if i not in masks and (draws[i].banned_token_ids or draws[i].logits_update is not None)
        ]
        others = {*changed}
        if raw := [i for i in due if i not in others]:
            asks = [_ask(i, draws[i], masks.get(i)) for i in raw]
            for i, token in zip(raw, self.backend_for(logits).sample(logits, asks), strict=True):
                tokens[i] = _why(_kept(logits[i], masks[i]), logits[i]) if token < 0 and i in masks else token
        if changed:
            scores = logits[changed].float()
            for row, i in zip(scores, changed, strict=True):
                change_logits(row, draws[i], seen)
            asks = [_ask(at, draws[i]) for at, i in enumerate(changed)]
            for at, (i, token) in enumerate(zip(changed, self.backend_for(scores).sample(scores, asks), strict=True)):
                tokens[i] = _why(scores[at], logits[i]) if token < 0 else token
        return [self._drawn(d, t, i, tokens, logits, lse) for i, (d, t) in enumerate(zip(draws, tokens, strict=True))]

    def _drawn(
        self, draw: SamplingRequest, token: int, row: int, tokens: list[int], logits: Tensor, lse: Tensor | None
    ) -> SampledToken:
        if draw.return_logits:
            return _whole(draw, logits[row])
        if draw.reference_request >= 0:
            return SampledToken(
                draw.sequence,
                tokens[draw.reference_request],
                divergence=_apart(logits[row], logits[draw.reference_request]),
            )
        scores = self._scores(logits[row], draw.logprobs, token, None if lse is None else lse[row])
        return SampledToken(draw.sequence, token, scores)

    def _scores(self, logits: Tensor, count: int, token: int, lse: Tensor | None) -> list[Score]:
        """Return the scores of ``token``, then of the ``count`` best ones, before any change of logits."""
        if count < 0 or token < 0:
            return []
        scores = logits.float()
        values = torch.log_softmax(scores, -1) if lse is None else scores - lse
        count = min(count, values.numel())
        ids = (
            self.top_tokens(logits[None], count)[0]
            if count
            else torch.empty(0, dtype=torch.int64, device=logits.device)
        )
        best = ids.tolist()
        rank = best.index(token) + 1 if token in best else _place(scores, token)
        ranked = zip(best, values[ids].tolist(), range(1, count + 1), strict=True)
        return [(token, float(values[token]), rank), *ranked]

    def top_tokens(self, logits: Tensor, count: int) -> Tensor:
        """Return, for logits [rows, V], the tokens of the first ``count`` ranks, int64 [rows, count]; NaN ranks
        first.
        """
        return self.backend_for(logits).top_tokens(logits, count)

    def backend_for(self, logits: Tensor) -> Backend:
        """Return the backend that draws from ``logits``: the native one on CPUs, for the dtypes that it takes."""
        native = self._native is not None and logits.is_cpu and logits.dtype in _NATIVE_TYPES
        return self._native if native and self._native is not None else self._plain


def _place(scores: Tensor, token: int) -> int:
    """Return a token's place among all by its score, from 1, as ``num_ranked_before`` counts. It makes no ids, which
    would take as long as all else.
    """
    value = scores[token]
    above, equal = torch.count_nonzero(scores > value), torch.count_nonzero(scores[:token] == value)
    return 1 + int(above + equal)


def num_ranked_before(scores: Tensor, token: Tensor | int, value: Tensor) -> Tensor:
    """Return how many of ``scores`` [..., V], fp32, rank before ``token``, which has ``value``: int64 [...]."""
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return ((scores > value) | ((scores == value) & (ids < token))).sum(-1)


def _open_native(threads: int) -> Backend | None:
    try:
        from .native import NativeSampling
    except ImportError as e:
        log.info("sampling with torch: %s", e)
        return None
    return NativeSampling(threads)


def _whole(draw: SamplingRequest, logits: Tensor) -> SampledToken:
    return SampledToken(draw.sequence, 0, logits=logits.float().contiguous().cpu().numpy().astype("<f4").tobytes())


def _apart(own: Tensor, other: Tensor) -> tuple[bool, float]:
    """Compare the logits of a request with those of its reference; see SampledToken."""
    log_p, log_q = own.float().log_softmax(-1), other.float().log_softmax(-1)
    p = log_p.exp()
    return bool(own.argmax() != other.argmax()), float(torch.where(p > 0, p * (log_p - log_q), 0.0).sum())


def _mask_alone(draw: SamplingRequest, seen: Mapping[int, LogitChanges], size: int) -> Tensor | None:
    """Return the bits of the draw's mask, if nothing else changes its ``size`` logits."""
    if draw.banned_token_ids or draw.logits_update is None or draw.sequence not in seen:
        return None
    changes = seen[draw.sequence]
    p = changes.penalties
    is_neutral = p.repetition == 1.0 and not (p.presence or p.frequency or p.logit_bias)
    alone = is_neutral and len(changes.masks) == 1 and not changes.banned_token_ids and changes.max_token_id < size
    return changes.masks[0].bits if alone else None


def _kept(row: Tensor, bits: Tensor) -> Tensor:
    """Return a copy of the row with minus infinity where ``bits`` allow no token."""
    kept = row.clone()
    forbid(kept, bits)
    return kept


def _ask(row: int, draw: SamplingRequest, allowed: Tensor | None = None) -> SampleSpec:
    settings = sampler_settings(draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.filter_order)
    if not (0 <= draw.seed < 1 << 64 and 0 <= draw.output_index < 1 << 64):
        raise ValueError(
            f"a draw of sequence {draw.sequence} has the seed {draw.seed} and the index {draw.output_index}"
        )
    return SampleSpec(row, settings, draw.seed, draw.output_index, allowed)


def change_logits(row: Tensor, draw: SamplingRequest, seen: Mapping[int, LogitChanges]) -> None:
    """Apply penalties, biases, masks and bans of a draw, in place. Raises ValueError for unknown tokens."""
    if draw.logits_update is not None:
        history = seen[draw.sequence]
        _penalise(row, history)
        for mask in history.masks:
            mask.apply(row)
        if history.banned_token_ids:
            row[list(history.banned_token_ids)] = float("-inf")
    if draw.banned_token_ids:
        if not 0 <= min(draw.banned_token_ids) <= max(draw.banned_token_ids) < len(row):
            raise ValueError(f"a draw of sequence {draw.sequence} bans a token beyond the {len(row)} that there are")
        _ban_stops(row, draw.banned_token_ids, () if draw.logits_update is None else seen[draw.sequence].masks)


def _ban_stops(row: Tensor, stops: list[int], masks: Sequence[TokenMask]) -> None:
    """Forbid stop tokens before ``min_tokens``, unless a mask overrules that and leaves no other token."""
    kept = row[stops]
    row[stops] = float("-inf")
    if any(mask.overrules_min_tokens for mask in masks) and bool(row.amax().isneginf()):
        row[stops] = kept


def _why(changed: Tensor, raw: Tensor) -> int:
    """Return the reason why no token could be drawn: the bans, or the logits themselves."""
    banned = bool(changed.amax().isneginf()) and bool(raw.amax().isfinite())
    return ALL_TOKENS_BANNED if banned else NO_TOKEN


def _penalise(row: Tensor, seen: LogitChanges) -> None:
    penalties, tokens = seen.penalties, seen.tokens
    if seen.max_token_id >= len(row):
        raise ValueError(f"penalties name the token {seen.max_token_id}, there are {len(row)}")
    if penalties.logit_bias:
        _add(row, list(penalties.logit_bias), row.new_tensor(list(penalties.logit_bias.values())))
    if penalties.repetition != 1.0:
        tokens = seen.tokens.to(row.device)
        old = row.gather(0, tokens)
        row.scatter_(0, tokens, torch.where(old > 0, old / penalties.repetition, old * penalties.repetition))
    if seen.counts and (penalties.presence or penalties.frequency):
        counts = row.new_tensor(list(seen.counts.values()))
        _add(row, list(seen.counts), -(penalties.presence + penalties.frequency * counts))


def _add(row: Tensor, tokens: list[int], values: Tensor) -> None:
    """Add values to the logits of ``tokens``, which are distinct, so that the order does not matter."""
    row.scatter_add_(0, torch.tensor(tokens, device=row.device), values)
