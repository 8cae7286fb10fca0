"""Where a sequence lies that one memory worker cannot hold: whole at home, but for what does not fit there. Pure
policy: no torch, no I/O, no clock.

Stripes are lent as a sequence is admitted, so no prompt migrates, and one by one as it grows. (Borrowing among
instances, arXiv 2401.02669 section 4: the creditor computes attention over what it holds, and no K or V comes back.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lamina.engine.sequence import Sequence
from lamina.protocol.loans import fitting, lend, rooms, settled, spread
from lamina.protocol.placement import Place

from .ledger import Ledger


class Loans:
    """The loans of a ledger whose sequences stay, but for stripes on loan. Blocks are by layer group."""

    def __init__(self, ledger: Ledger, homes: int = 0) -> None:
        """``homes``: lanes in which sequences begin, the first ones; 0 = all."""
        self._homes = homes or ledger.num_lanes
        self._ledger, self._placement = ledger, ledger.placement
        self._size = ledger.block_size
        first = self.room(ledger.num_blocks)  # one lane of each worker
        self._owners = {lane: next(at for at in first if self._same(at, lane)) for lane in range(ledger.num_lanes)}

    def place(self, begun: Place | None, length: int, kept: int, blocks: Iterable[int]) -> Place | None:
        """For a new sequence of ``length`` tokens into ``blocks``; None where it does not fit. ``begun``: where its
        first ``kept`` tokens are; None: nowhere.
        """
        room, first = self.room(blocks), self._stripes(kept)
        home = max((lane for lane in room if lane < self._homes), key=lambda lane: room[lane])
        place = Place(home) if begun is None else settled(begun, first)
        return spread(place, first, self._stripes(length), room)

    def places(self, length: int, blocks: list[int]) -> list[Place]:
        """For a sequence of ``length`` tokens that may begin anywhere: whole in a lane; else spread over several, from
        the one with the most room on.
        """
        whole = [Place(lane) for lane, room in self.room(blocks).items() if self._may_begin(lane, room, length)]
        lent = None if whole else self.place(None, length, 0, blocks)
        return whole or ([lent] if lent else [])

    def _may_begin(self, lane: int, room: int, length: int) -> bool:
        return lane < self._homes and room >= self._stripes(length)

    def settled(self, place: Place, length: int) -> Place:
        """Where the first ``length`` tokens of a sequence at ``place`` are."""
        return settled(place, self._stripes(length))

    def grow(self, wanted: Mapping[Sequence, int], free: Callable[[], list[int]]) -> list[Sequence]:
        """Borrow for the next rows of sequences that decode, so many each, where they begin a stripe for which home has
        no room. ``free``: blocks that they can have; most steps do not ask. Returns the sequences that lie in as many
        pieces as a place can name: they have to begin anew elsewhere.
        """
        blocks: list[int] | None = None
        stuck = list[Sequence]()
        for sequence, count in wanted.items():
            begun = self._stripes(sequence.num_scheduled if sequence.decodes else sequence.num_promised)
            for number in range(begun, self._stripes(sequence.num_scheduled + count)):
                blocks = free() if blocks is None else blocks
                if not self._begin(sequence, number, blocks):
                    stuck.append(sequence)
                    break
        return stuck

    def _begin(self, sequence: Sequence, number: int, blocks: list[int]) -> bool:
        """Whether some worker can have that stripe, as far as pieces go."""
        place, stripe = sequence.place, self._placement.stripe
        need = min(stripe, -(-sequence.max_len // self._size) - number * stripe)
        owner = self._owners[self._placement.lane(place, number)]
        if self._least(owner, blocks) < need or (place.moved and not fitting(place, owner, number, 1)):
            room = self.room(blocks)
            fit = [lane for lane in room if fitting(place, lane, number, 1)]
            if not fit:
                return False
            last = place.moved[-1].lane if place.moved else place.lane
            owner = max(fit, key=lambda lane: (room[lane] > 0, lane == place.lane, lane == last, room[lane]))
            sequence.place = lend(settled(place, number), number, number + 1, owner)
        for group, lanes in enumerate(self._ledger.lanes):
            if owner in lanes and not self._ledger.windows[group]:
                blocks[group] -= need
        return True

    def borrowed(self, sequences: Iterable[Sequence]) -> list[int]:
        """KV blocks by layer group that lie with a creditor; of groups with a window none are counted."""
        counts = [0] * len(self._ledger.lanes)
        for sequence in sequences:
            most = -(-sequence.num_scheduled // self._size)
            for run in sequence.place.moved:
                low, high = (min(x * self._placement.stripe, most) for x in (run.start, run.stop))
                for group, lanes in enumerate(self._ledger.lanes):
                    counts[group] += (high - low) * (run.lane in lanes and not self._ledger.windows[group])
        return counts

    def room(self, blocks: Iterable[int]) -> dict[int, int]:
        """Lane -> stripes, the first lane of each memory worker."""
        return rooms(self._placement, self._ledger.lanes, self._ledger.windows, blocks)

    def _least(self, lane: int, blocks: list[int]) -> int:
        each = zip(blocks, self._ledger.lanes, self._ledger.windows, strict=True)
        return min((n for n, lanes, window in each if lane in lanes and not window), default=0)

    def _same(self, one: int, other: int) -> bool:
        return all((one in lanes) == (other in lanes) for lanes in self._ledger.lanes)

    def _stripes(self, length: int) -> int:
        return -(-length // (self._placement.stripe * self._size))
