"""What sessions have left in the pool and beside it: where it is, and how it is given up. Pure policy: no torch, no
I/O, no clock.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable

from lamina.engine.conversations.ranges import count_of, joined, lacking
from lamina.engine.conversations.sessions import (
    NOWHERE,
    POOL,
    SessionCopy,
    SessionFacts,
    SessionName,
    SessionState,
)
from lamina.engine.sequence import Sequence
from lamina.kv.keys import tenant_of
from lamina.protocol.placement import Place
from lamina.protocol.plan import Free, SequenceOp, Shift, Truncate

from .ledger import Ledger
from .prefixes import Prefixes
from .tier import Tier


class Leaves:
    """Of all sessions, whose leaves ``prefixes`` retains."""

    def __init__(self, prefixes: Prefixes, ledger: Ledger, tier: Tier | None) -> None:
        self._sessions, self._prefixes, self._tier = prefixes.sessions, prefixes, tier
        self._ledger = ledger
        self.num_shifts = 0

    def of_tenant(self, tenant: bytes) -> list[SessionFacts]:
        """What a tenant is told of its sessions."""
        sessions = self._sessions.of_tenant(tenant)
        return [SessionFacts(s.name.name, s.turns, s.length, self._tier_of(s)) for s in sessions]

    @property
    def by_tier(self) -> Counter[str]:
        """How many sessions of all tenants."""
        return Counter(map(self._tier_of, self._sessions.all()))

    def shift(self, sequence: Sequence) -> Shift | None:
        """The op that brings the leaf of a waiting turn's session nearer to the positions that its tokens have in that
        turn, by one range of discarded ones; in the next round the turn can begin, or another range goes. None: it is
        there, or there is none. A leaf that cannot be moved is not found. No op of this round may be about the leaf.
        """
        session = sequence.session
        if session is None or session.leaf is None or session.discarded == sequence.discarded:
            return None
        gone, more = session.discarded, lacking(session.discarded, sequence.discarded)
        if more is None or lacking(sequence.discarded, gone):  # it has lost tokens that the turn has
            return None
        op = Shift(session.leaf, more[0] - count_of(gone, more[0]), more[1] - more[0])
        if op.first + op.count >= session.length or not self._ledger.can_shift(op):
            return None
        self._prefixes.set_apart(op.sequence, op.first, op.count)
        session.length -= op.count
        session.discarded = joined([*gone, more])
        self.num_shifts += 1
        return op

    def left(self, sequence: Sequence, op: SequenceOp) -> list[SequenceOp]:
        """Ops for the pages beside the pool of a sequence that has ended, behind the op of its end. Of a sequence that
        failed nothing stays, not even pages that were saved before.
        """
        if self._tier is None:
            return []
        if sequence.output.went_wrong and not sequence.outlived:
            return [*self._tier.delete(sequence.id, self._tier.keys_of(sequence, sequence.num_offered))]
        if sequence.discarded or sequence.sparse or sequence.outlived:
            return []
        if not isinstance(op, Truncate):  # others have all of it, or the op frees others
            own = isinstance(op, Free) and op.sequence == sequence.id
            return [*self._tier.prolong(sequence, min(sequence.num_scheduled, len(sequence.tokens)))] if own else []
        if (session := sequence.sleeping) is not None:
            keys = self._tier.keys_of(sequence, op.length, parts=True)
            still = set(keys)
            session.left_behind |= {key: None for key in session.keys if key not in still}
            session.keys, session.salt = keys, sequence.salt
            session.tokens = array("I", sequence.tokens[: len(keys) * self._tier.page])
        return [*self._tier.save(sequence, op.length), *self._tier.prolong(sequence, op.length)]

    def copy(self, name: SessionName) -> SessionCopy | None:
        """For another engine; None: there is no such session. Raises ValueError where it would find no KV."""
        session, tier = self._sessions.named(name), self._with_tier()
        if session is None:
            return None
        return SessionCopy(
            identity=tier.identity, name=name.name, turns=session.turns, salt=session.salt,
            tokens=_little(session.tokens).tobytes(),
        )  # fmt: skip

    def bring(self, tenant: bytes, copy: SessionCopy, most: int) -> None:
        """Take over a session of ``tenant``, of ``most`` tokens at most. Raises ValueError for one that cannot be."""
        name, tier = SessionName(tenant, copy.name), self._with_tier()
        if copy.identity != tier.identity:
            raise ValueError("it is of another model, or of KV in another form, than this server's")
        if tenant_of(copy.salt) != tenant:
            raise ValueError("it is of another API key than yours")
        if self._sessions.named(name) is not None:
            raise ValueError(f"there is a session {name.name!r}: drop that first")
        tokens = array("I")
        if len(copy.tokens) > most * tokens.itemsize:
            raise ValueError(f"it has more than the {most} tokens of this server's --max-model-len")
        tokens.frombytes(copy.tokens[: len(copy.tokens) // tokens.itemsize * tokens.itemsize])
        session = self._sessions.of(name)
        session.turns, session.salt, session.tokens = max(1, copy.turns), copy.salt, _little(tokens)
        session.keys, session.length = tier.keys_behind(copy.salt, session.tokens), len(session.tokens)
        session.place = max(map(Place, range(self._ledger.num_lanes)), key=lambda p: tier.num_there(session.keys, p))

    def _with_tier(self) -> Tier:
        if self._tier is None or self._tier.medium == "host":
            raise ValueError("sessions go from server to server with the KV in --kv-store-dir: start it with that")
        return self._tier

    def drop(self, name: SessionName, running: Iterable[Sequence]) -> list[SequenceOp] | None:
        """Forget a session and give up its KV, but for pages that others have too; a turn of it among ``running``
        leaves nothing. None: there is no such session.
        """
        session = self._sessions.drop(name)
        if session is None:
            return None
        turns = [sequence for sequence in running if sequence.session is session]
        for sequence in turns:
            sequence.outlived = True
        leaf, ops = session.leaf, list[SequenceOp]()
        if leaf is not None:
            ops.append(self._prefixes.evict(leaf))  # which takes it from the session
        if self._tier:
            filled = [key for sequence in turns for key in self._tier.keys_of(sequence, sequence.num_offered)]
            shared = set(self._prefixes.page_keys()).union(*(s.keys for s in self._sessions.all()))
            keys = dict.fromkeys([*session.keys, *session.left_behind, *filled])
            ops += self._tier.delete(-1 if leaf is None else leaf, [key for key in keys if key not in shared])
        return ops

    def _tier_of(self, session: SessionState) -> str:
        if session.leaf is not None:
            return POOL
        tier = self._tier
        return tier.medium if tier and tier.num_there(session.keys[:1], session.place) else NOWHERE


def _little(tokens: array[int]) -> array[int]:
    """The same in the other order of bytes, where this machine's is not little-endian."""
    if sys.byteorder == "little":
        return tokens
    swapped = array("I", tokens)
    swapped.byteswap()
    return swapped
