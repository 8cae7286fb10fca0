"""What a compute worker does with the other ranks of its replica: go through turns in one order, and draw tokens.

All ranks run the same slices on their parts of the weights, and meet inside of them (``lamina.collective``). Rank 0
leads: where the order of turns depends on when rounds come, it says whose turn it is, and it alone draws.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lamina.collective import Collective
from lamina.protocol.control import Draw, Drawn, RunStep
from lamina.sampling.history import Seen
from lamina.sampling.sampler import Sampler, before

_NOTHING: Mapping[int, Seen] = MappingProxyType({})


class Turn(NamedTuple):
    """A slice of one batch's step, in the order of service that all workers share: by round, slice and batch.

    The last slice counts as one of the next round, ahead of the first slice of the same batch there: with sampling
    between them the two are one turn.
    """

    round: int
    slice: int
    batch: int
    begins: bool


Turns = list[tuple[Turn, RunStep]]  # a heap


class Ranks(Protocol):
    """All ranks of a replica, as one of them sees them."""

    @property
    def leads(self) -> bool:
        """Whether this rank tells the driver what was drawn."""
        ...

    def may_take(self, turns: Turns) -> bool:
        """Whether ``take`` will find something."""
        ...

    def take(self, turns: Turns) -> tuple[Turn, RunStep] | None:
        """Remove the next turn; None if it is one that has not come yet."""
        ...

    def draw(self, logits: Tensor, draws: list[Draw], seen: Mapping[int, Seen]) -> list[Drawn]:
        """One token for each row of ``logits`` [len(draws), this rank's vocabulary]; see sampling.Sampler.draw."""
        ...


class Alone:
    """One rank with all weights."""

    leads = True

    def __init__(self) -> None:
        self._sampler = Sampler()

    def may_take(self, turns: Turns) -> bool:
        """Whether there is a turn to take."""
        return bool(turns)

    def take(self, turns: Turns) -> tuple[Turn, RunStep] | None:
        """Remove the next turn, which is there."""
        return heapq.heappop(turns)

    def draw(self, logits: Tensor, draws: list[Draw], seen: Mapping[int, Seen]) -> list[Drawn]:
        """One token for each row of ``logits`` [len(draws), vocabulary]."""
        return self._sampler.draw(logits, draws, seen)


class Together:
    """Several ranks."""

    def __init__(self, collective: Collective, num_batches: int) -> None:
        """``num_batches`` take turns: of a single one, turns come in one order by themselves."""
        self._collective = collective
        self._ordered = num_batches > 1
        self._due: Turn | None = None  # the turn that rank 0 has named
        self.leads = collective.rank == 0
        self._sampler = Sampler()

    def may_take(self, turns: Turns) -> bool:
        """Whether there is a turn to take: any, or the one that rank 0 has named, once it has come."""
        return bool(turns) if self._due is None else any(turn == self._due for turn, _ in turns)

    def take(self, turns: Turns) -> tuple[Turn, RunStep] | None:
        """Remove the turn that rank 0 names, the same on all ranks; None if none has come yet. Raises ChannelError."""
        if not self._ordered:
            return heapq.heappop(turns)
        if self.leads:
            self._collective.broadcast(torch.tensor(turns[0][0]))
            return heapq.heappop(turns)
        if self._due is None:
            self._due = Turn(*self._collective.broadcast(torch.empty(len(Turn._fields), dtype=torch.int64)).tolist())
        index = next((i for i, (turn, _) in enumerate(turns) if turn == self._due), None)
        if index is None:
            return None
        self._due, taken = None, turns.pop(index)
        heapq.heapify(turns)
        return taken

    def draw(self, logits: Tensor, draws: list[Draw], seen: Mapping[int, Seen]) -> list[Drawn]:
        """One token for each row of ``logits`` [len(draws), this rank's vocabulary], the same on all ranks. Raises
        ChannelError.

        Rank 0 gets each rank's best few logits and those that a draw names; the whole logits only where one samples
        without ``top_k``, or with ``top_p`` before it, or names a large part of the vocabulary.
        """
        group, width = self._collective, logits.shape[1]
        few = Few.of(draws, width, seen)
        if few is None:
            whole = group.all_gather(logits.contiguous(), group.size)
        else:
            packed = few.pack(logits.float(), draws, seen, group.rank * width, self._sampler)
            whole = few.unpack(group.all_gather(packed, group.size), group.size * width)
        asked = any(draw.logprobs >= 0 for draw in draws)
        lse = self._log_sums(logits.float(), draws) if asked else None
        drawn = self._sampler.draw(whole, draws, seen, lse) if self.leads else []
        tokens = torch.tensor([d.token for d in drawn]) if self.leads else torch.empty(len(draws), dtype=torch.int64)
        told = group.broadcast(tokens).tolist()
        if few is not None and asked:
            places = self._places(logits.float(), whole, told)
            drawn = _ranked(drawn, places) if self.leads else []
        return drawn or [Drawn(d.sequence, token) for d, token in zip(draws, told, strict=True)]

    def _log_sums(self, raw: Tensor, draws: list[Draw]) -> Tensor:
        """Of each row that a draw wants scores of, log-sum-exp over all ranks, [n] fp32; 0 of others. Ranks sum their
        own part, whatever other draws need of the logits, so that no bit depends on them.
        """
        parts = self._collective.all_gather(_row_sums(raw, draws)[:, None].contiguous(), self._collective.size)
        return _row_sums(parts, draws)

    def _places(self, raw: Tensor, known: Tensor, tokens: list[int]) -> list[int]:
        """Of ``tokens`` among all, from 1. ``raw`` [n, width] fp32: this rank's logits; ``known`` [n, vocabulary]."""
        group, width = self._collective, raw.shape[1]
        chosen = torch.tensor(tokens).clamp_min(0)[:, None]
        values = known.gather(1, chosen.to(known.device))
        processed = before(raw, (chosen - group.rank * width).to(raw.device), values.to(raw.device))
        everywhere = group.all_gather(processed.float()[:, None].contiguous(), group.size)  # exact below 2^24
        return [int(count) + 1 for count in everywhere.sum(1).tolist()]


def _ranked(drawn: list[Drawn], places: list[int]) -> list[Drawn]:
    """The same tokens, each with its place among all tokens by log-probability."""
    return [
        Drawn(d.sequence, d.token, [(*d.logprobs[0][:2], place), *d.logprobs[1:]]) if d.logprobs else d
        for d, place in zip(drawn, places, strict=True)
    ]


def _row_sums(values: Tensor, draws: list[Draw]) -> Tensor:
    """log-sum-exp of the rows that a draw wants scores of: one by one, as torch sums a row alone in another order."""
    sums = values.new_zeros(len(values))
    for i, draw in enumerate(draws):
        if draw.logprobs >= 0:
            sums[i] = values[i].logsumexp(0)
    return sums


class Few(NamedTuple):
    """How many logits of each rank the draws of a step need: the ``best`` highest ones, and ``named`` ones that draws
    name.
    """

    best: int
    named: int

    @staticmethod
    def of(draws: list[Draw], width: int, seen: Mapping[int, Seen] = _NOTHING) -> Few | None:
        """The least that serves all ``draws``; None: they need all logits. ``width``: of one rank's logits."""
        best, named = 1, 0
        for draw in draws:
            of_few = draw.known >= 0 or draw.temperature == 0.0 or _of_allowed(draw, seen)
            if draw.whole or draw.beside >= 0 or not (of_few or (draw.top_k and not _shares_all(draw))):
                return None
            names = _named(draw, seen)
            # Penalties may put as many others in the place of the best as they name.
            others = 1 if _of_allowed(draw, seen) else draw.top_k + len(names) + 1
            best = max(best, others, draw.logprobs)
            named = max(named, len(names))
        return Few(best, named) if best + named < width / 2 else None

    def pack(self, raw: Tensor, draws: list[Draw], seen: Mapping[int, Seen], first: int, sampler: Sampler) -> Tensor:
        """raw [n, width] fp32, of the tokens from ``first`` on -> [n, 2 * (best + named)] fp32: values, and the ids of
        their tokens (exact below 2^24).
        """
        best = sampler.best(raw, self.best)  # of equals the lowest ids, as sampling prefers them
        named = best[:, :1].repeat(1, self.named)
        for row, draw in zip(named, draws, strict=True):
            own = [i - first for i in _named(draw, seen) if 0 <= i - first < raw.shape[1]]
            row[: len(own)] = torch.tensor(own, dtype=row.dtype)
        ids = torch.cat([best, named], 1)
        return torch.cat([raw.gather(1, ids), (ids + first).float()], 1)

    def unpack(self, packed: Tensor, vocabulary: int) -> Tensor:
        """The packed logits of all ranks -> logits [n, vocabulary], minus infinity where they are not known."""
        count = self.best + self.named
        parts = packed.view(len(packed), -1, 2 * count)
        values, ids = parts[..., :count], parts[..., count:].long()
        logits = packed.new_full((len(packed), vocabulary), float("-inf"))
        return logits.scatter_(1, ids.flatten(1), values.flatten(1))


def _shares_all(draw: Draw) -> bool:
    """Whether the draw's top_p is a share of the probability of all tokens, not of the tokens that top_k leaves."""
    return draw.top_p < 1.0 and draw.order.index("top_p") < draw.order.index("top_k")


def _named(draw: Draw, seen: Mapping[int, Seen]) -> list[int]:
    """The tokens whose logits the draw looks at, however low they are."""
    tokens = {*draw.banned, *([draw.known] if draw.known >= 0 else [])}
    if draw.adjust is not None:
        history = seen[draw.sequence]
        if history.allowed is not None:
            return cast("list[int]", history.allowed.tolist())
        tokens |= {*history.penalties.bias, *history.tokens.tolist(), *history.forbidden}
    return sorted(tokens)


def _of_allowed(draw: Draw, seen: Mapping[int, Seen]) -> bool:
    """Whether the draw looks only at tokens that it names."""
    return draw.adjust is not None and seen[draw.sequence].allowed is not None
