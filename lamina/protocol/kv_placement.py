"""Which memory worker keeps which tokens of a sequence: (sequence, stripe, head) -> memory worker. No other module
computes that.

The scheduler chooses the KV shard in which a sequence begins, its *first KV shard*. After each stripe the sequence
continues in the next KV shard, or it stays in its KV shard: the partition's rule. Exceptions are runs of stripes that
lie elsewhere, on loan or because they were moved. The partition names the owner of a KV shard, head by head
(config.partition).

The first KV shard and the exceptions are a *location*. The rows of a plan carry the location of their sequence, so the
two always agree: a refused plan changes no location, and a plan that is sent again names the same one. With a new
location memory workers give back the blocks of stripes that have left them, and hold blocks for stripes that come. The
code that changes a location also moves the tokens before rows read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from lamina.config.partition import KvShards

MAX_RUNS = 64


class StripeRun(msgspec.Struct, frozen=True, array_like=True):
    """The stripes ``start .. stop`` of a sequence lie in ``kv_shard``."""

    start: int
    stop: int
    kv_shard: int


class KvLocation(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's KV shards: from ``kv_shard`` on, except for the stripes of ``moved_runs``, in their order."""

    kv_shard: int = 0  # the first one
    moved_runs: tuple[StripeRun, ...] = ()


FIRST_LOCATION = KvLocation()


class KvPlacement(NamedTuple):
    """The rule by which stripes of sequences lie in KV shards.

    ``stripe``: in tokens, or blocks, as its user counts; 0 = a sequence stays whole in its first KV shard.
    ``single_shard``: a sequence stays there, except for the runs that have moved.
    """

    num_kv_shards: int
    stripe: int
    single_shard: bool = False

    def kv_shard_of(self, location: KvLocation, number: int) -> int:
        """The KV shard of the owner of the stripe ``number`` of a sequence."""
        for run in location.moved_runs:
            if run.start <= number < run.stop:
                return run.kv_shard
        return (
            (location.kv_shard + number) % self.num_kv_shards
            if self.stripe and not self.single_shard
            else location.kv_shard
        )

    def kv_shard_at(self, location: KvLocation, position: int) -> int:
        """The KV shard of the owner of a token or block, as ``stripe`` counts."""
        return self.kv_shard_of(location, position // self.stripe if self.stripe else 0)

    def owned_runs(self, kv_shards: KvShards, location: KvLocation, stripes: range) -> Iterator[range]:
        """The runs of ``stripes`` whose owner ``kv_shards`` are, in order."""
        ends = (x for run in location.moved_runs for x in (run.start, run.stop)) if self.single_shard else stripes
        for low, high in pairwise(sorted({*stripes[:1], *(x for x in ends if x in stripes), stripes.stop})):
            if self.kv_shard_of(location, low) in kv_shards:
                yield range(low, high)

    def is_whole(self, kv_shards: KvShards, location: KvLocation) -> bool:
        """Whether all of a sequence at ``location`` has one owner, to whom ``kv_shards`` belong entirely or not at "
        "all."""
        return not self.stripe or kv_shards.has_all or (self.single_shard and not location.moved_runs)

    def same_owners(self, one: KvLocation, other: KvLocation, stripes: int) -> bool:
        """Whether the first ``stripes`` of a sequence have the same owners at both places."""
        same = one.kv_shard == other.kv_shard and one.moved_runs == other.moved_runs
        return same or (
            self.stripe > 0 and all(self.kv_shard_of(one, n) == self.kv_shard_of(other, n) for n in range(stripes))
        )

    def check(self, location: KvLocation) -> None:
        """Raises ValueError where there can be no such place."""
        runs = location.moved_runs
        stops = [0, *(run.stop for run in runs)]
        if not 0 <= location.kv_shard < self.num_kv_shards:
            raise ValueError(f"lane {location.kv_shard} of {self.num_kv_shards}")
        if runs and (not self.stripe or len(runs) > MAX_RUNS):
            raise ValueError(
                f"{len(runs)} runs of stripes in other lanes, at most {MAX_RUNS if self.stripe else 0} can be"
            )
        for run, before in zip(runs, stops, strict=False):
            if not before <= run.start < run.stop or not 0 <= run.kv_shard < self.num_kv_shards:
                raise ValueError(
                    f"stripes {run.start}..{run.stop} behind {before} in lane {run.kv_shard} of {self.num_kv_shards}"
                )


class ShardCounter:
    """How many units of a sequence are kept in some KV shards, in the unit of the placement's stripe."""

    def __init__(self, kv_shards: KvShards, placement: KvPlacement) -> None:
        self._kv_shards, self._stripe, self._all = kv_shards, placement.stripe, kv_shards.has_all
        self._single_shard = placement.single_shard
        self._period = placement.num_kv_shards
        pattern = kv_shards.pattern if len(kv_shards.pattern) == self._period else kv_shards.pattern * self._period
        self._before = [0, *accumulate(pattern * 2)]  # KV shards that are kept, of those below

    def num_owned(self, location: KvLocation, units: int) -> int:
        """How many of the first ``units`` of a sequence are kept."""
        if self._all:
            return units
        if not self._stripe:
            return units if location.kv_shard in self._kv_shards else 0
        count = self._by_rule(location.kv_shard, units)
        for run in location.moved_runs:
            low, high = (min(x * self._stripe, units) for x in (run.start, run.stop))
            count += (high - low) * (run.kv_shard in self._kv_shards)
            count -= self._by_rule(location.kv_shard, high) - self._by_rule(location.kv_shard, low)
        return count

    def _by_rule(self, kv_shard: int, units: int) -> int:
        if self._single_shard:
            return units if kv_shard in self._kv_shards else 0
        whole, rest = divmod(units, self._stripe)
        rounds, more = divmod(whole, self._period)
        before = self._before
        stripes = rounds * before[self._period] + before[kv_shard + more] - before[kv_shard]
        return stripes * self._stripe + rest * (before[kv_shard + more + 1] - before[kv_shard + more])
