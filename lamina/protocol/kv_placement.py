"""The mapping from a sequence's tokens to memory workers: (sequence, stripe, head) -> memory worker. Only this module
computes it.

The scheduler chooses the KV shard in which a sequence begins, its *first KV shard*. By the partition's rule the
sequence continues after each stripe in the next KV shard, or it stays in its first one. Exceptions are runs of stripes
that lie elsewhere, on loan or because they were moved. The partition names the owner of a KV shard, head by head
(config.partition).

The first KV shard and the exceptions are a *location*. The rows of a plan carry the location of their sequence, so the
two always agree. A refused plan changes no location, and a plan that is sent again names the same one. Given a new
location, memory workers free the blocks of stripes that have left, and hold blocks for stripes that come. The code that
changes a location also moves the tokens before rows read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from lamina.config.partition import KvShards

MAX_RUNS = 64


class StripeRun(msgspec.Struct, frozen=True, array_like=True):
    """The stripes ``start .. stop`` of a sequence, which lie in ``kv_shard``."""

    start: int
    stop: int
    kv_shard: int


class KvLocation(msgspec.Struct, frozen=True, array_like=True):
    """The KV shards of a sequence: by rule from ``kv_shard`` on, except the stripes of ``moved_runs``, in order."""

    kv_shard: int = 0  # the first one
    moved_runs: tuple[StripeRun, ...] = ()


FIRST_LOCATION = KvLocation()


class KvPlacement(NamedTuple):
    """The rule by which stripes of sequences lie in KV shards.

    ``stripe``: in tokens or blocks, as its user counts; 0: a sequence is not divided. ``single_shard``: a sequence
    stays in its first KV shard, except for runs that have moved.
    """

    num_kv_shards: int
    stripe: int
    single_shard: bool = False

    def kv_shard_of(self, location: KvLocation, number: int) -> int:
        """Return the KV shard of the stripe ``number`` of a sequence."""
        for run in location.moved_runs:
            if run.start <= number < run.stop:
                return run.kv_shard
        return (
            (location.kv_shard + number) % self.num_kv_shards
            if self.stripe and not self.single_shard
            else location.kv_shard
        )

    def kv_shard_at(self, location: KvLocation, position: int) -> int:
        """Return the KV shard of a token or block, counted in the unit of ``stripe``."""
        return self.kv_shard_of(location, position // self.stripe if self.stripe else 0)

    def owned_runs(self, kv_shards: KvShards, location: KvLocation, stripes: range) -> Iterator[range]:
        """Yield the runs of ``stripes`` that lie in ``kv_shards``, in order."""
        ends = (x for run in location.moved_runs for x in (run.start, run.stop)) if self.single_shard else stripes
        for low, high in pairwise(sorted({*stripes[:1], *(x for x in ends if x in stripes), stripes.stop})):
            if self.kv_shard_of(location, low) in kv_shards:
                yield range(low, high)

    def is_whole(self, kv_shards: KvShards, location: KvLocation) -> bool:
        """Return whether ``kv_shards`` have all or none of any sequence at ``location``, never a part."""
        return not self.stripe or kv_shards.has_all or (self.single_shard and not location.moved_runs)

    def same_owners(self, one: KvLocation, other: KvLocation, stripes: int) -> bool:
        """Return whether the first ``stripes`` of a sequence have the same owners at both locations."""
        same = one.kv_shard == other.kv_shard and one.moved_runs == other.moved_runs
        return same or (
            self.stripe > 0 and all(self.kv_shard_of(one, n) == self.kv_shard_of(other, n) for n in range(stripes))
        )

    def check(self, location: KvLocation) -> None:
        """Raise ValueError if there can be no such location."""
        runs = location.moved_runs
        stops = [0, *(run.stop for run in runs)]
        if not 0 <= location.kv_shard < self.num_kv_shards:
            raise ValueError(f"KV shard {location.kv_shard} of {self.num_kv_shards}")
        if runs and (not self.stripe or len(runs) > MAX_RUNS):
            raise ValueError(
                f"{len(runs)} runs of stripes in other KV shards, at most {MAX_RUNS if self.stripe else 0} can be"
            )
        for run, before in zip(runs, stops, strict=False):
            if not before <= run.start < run.stop or not 0 <= run.kv_shard < self.num_kv_shards:
                raise ValueError(
                    f"stripes {run.start}..{run.stop} after {before} in KV shard {run.kv_shard} of {self.num_kv_shards}"
                )


class ShardCounter:
    """Counts the units of a sequence that some KV shards keep, in the unit of the placement's stripe."""

    def __init__(self, kv_shards: KvShards, placement: KvPlacement) -> None:
        self._kv_shards, self._stripe, self._all = kv_shards, placement.stripe, kv_shards.has_all
        self._single_shard = placement.single_shard
        self._period = placement.num_kv_shards
        pattern = kv_shards.pattern if len(kv_shards.pattern) == self._period else kv_shards.pattern * self._period
        self._before = [0, *accumulate(pattern * 2)]  # number of kept KV shards with a smaller number

    def num_owned(self, location: KvLocation, units: int) -> int:
        """Return how many of the first ``units`` of a sequence are kept."""
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
