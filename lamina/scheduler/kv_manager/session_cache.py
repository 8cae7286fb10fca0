"""The KV of sessions, in the pool and in storage. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several

from lamina.config.conflicts import SESSION_FILE, need_text
from lamina.kv.page_keys import tenant_of
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.blocks.extents import sequences_of_op
from lamina.protocol.step_plan import ContextShift, Free, SequenceOp, Truncate
from lamina.scheduler.feature import Feature, Leaving
from lamina.scheduler.prefix_index import Keyed, KeyedTokens
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.session_table import (
    NOWHERE,
    POOL,
    SessionCopy,
    SessionInfo,
    SessionName,
    SessionState,
)
from lamina.scheduler.sessions.token_ranges import count_tokens, first_missing, union
from lamina.scheduler.starts import Candidates, KvStart, Verdict

from .offload_index import OffloadIndex
from .prefix_cache import PrefixCache


class SessionCache(Feature):
    """Manages the KV of all sessions, whose last turns the prefix cache retains."""

    def __init__(self, prefix_cache: PrefixCache, accounting: BlockTables, offload_index: OffloadIndex | None) -> None:
        self._sessions, self._prefix_cache, self._offload_index = prefix_cache.sessions, prefix_cache, offload_index
        self._accounting = accounting
        self.num_shifts = 0

    def list_tenant(self, tenant: bytes) -> list[SessionInfo]:
        sessions = self._sessions.list_tenant(tenant)
        return [SessionInfo(s.name.name, s.turns, s.length, self._tier_of(s)) for s in sessions]

    @property
    def count_by_tier(self) -> Counter[str]:
        """The number of sessions of all tenants, by tier."""
        return Counter(map(self._tier_of, self._sessions.list_all()))

    def shift_op(self, sequence: Sequence) -> ContextShift | None:
        """Return the op that drops one more range of a session's KV, as its truncated turn requires; None if there is
        none.

        In the next round the turn can begin, or another range is dropped. No other op of this round may use that KV.
        """
        session = sequence.turn.session
        if (
            session is None
            or session.retained_sequence is None
            or session.discarded_ranges == sequence.turn.discarded_ranges
        ):
            return None
        gone, more = session.discarded_ranges, first_missing(session.discarded_ranges, sequence.turn.discarded_ranges)
        if more is None or first_missing(sequence.turn.discarded_ranges, gone):  # it has lost tokens that the turn has
            return None
        op = ContextShift(session.retained_sequence, more[0] - count_tokens(gone, more[0]), more[1] - more[0])
        if op.first + op.count >= session.length or not self._accounting.can_shift(op):
            return None
        self._prefix_cache.detach(op.sequence, op.first, op.count)
        session.length -= op.count
        session.discarded_ranges = union([*gone, more])
        self.num_shifts += 1
        return op

    def may_start(self, sequence: Sequence) -> bool:
        """True for a truncated turn."""
        return bool(sequence.turn.discarded_ranges)

    def find_starts(self, candidates: Candidates) -> None:
        """Let a truncated turn begin only with its session's retained sequence, or with the session's saved pages.

        The retained sequence may have to be shifted first, in a round in which no other op uses it.
        """
        sequence = candidates.sequence
        if candidates.is_settled or not sequence.turn.discarded_ranges:
            return
        candidates.is_settled, session = True, sequence.turn.session
        if session is None:
            return
        batches, leaf = candidates.batches, session.retained_sequence
        if leaf is not None and any(leaf in sequences_of_op(op) for batch in batches for op in batch.ops):
            candidates.verdict = Verdict.STEPS_ASIDE
            return
        if (shift := self.shift_op(sequence)) is not None:
            batches[0].ops.append(shift)
            candidates.verdict = Verdict.STEPS_ASIDE
            return
        alike = session.discarded_ranges == sequence.turn.discarded_ranges
        hit = self._prefix_cache.match_session(sequence) if alike else None
        load = self._offload_index.find_shifted(sequence) if self._offload_index and hit is None else None
        candidates.starts += [start for start in (load, hit) if start is not None]

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[SequenceOp, ...]:
        """Record which tier had the KV of a turn that begins."""
        sequence = candidates.sequence
        if sequence.turn.session is not None and not sequence.num_preemptions:
            medium = self._offload_index.backend if self._offload_index else NOWHERE
            tier = NOWHERE if start is None else medium if start.source is None else POOL
            self._sessions.on_turn_began(sequence.turn.session, tier)
        return ()

    def on_leave(self, leaving: Leaving) -> None:
        """Save, delete or keep the pages of a finished sequence, depending on what happens to its KV in the pool."""
        if self._offload_index and leaving.op is not None and not leaving.is_preempted:
            leaving.first += self._page_ops(self._offload_index, leaving.sequence, leaving.op)

    def _page_ops(self, index: OffloadIndex, sequence: Sequence, op: SequenceOp) -> list[SequenceOp]:
        """Return the ops for a finished sequence's pages, after ``op`` which ends it.

        If it failed, its saved pages are deleted.
        """
        if sequence.output.went_wrong and not sequence.do_not_cache:
            keys = index.keys_of(sequence, index.num_filled_tokens(sequence))
            return [*index.delete_ops(sequence.id, [*keys, *index.states.keys_along(sequence)])]
        if sequence.turn.discarded_ranges or sequence.do_not_cache:
            return []
        session = self._prefix_cache.session_to_retain(sequence)
        if sequence.kept.drops_blocks:  # pages of its prompt are stored, and the pool keeps none
            length = index.num_filled_tokens(sequence)
            if session is not None:
                session.length, session.location = length, sequence.location
                self._set_pages(index, session, sequence, index.keys_of(sequence, length))
            return [*index.retention_ops(sequence, length)]
        if not isinstance(op, Truncate):  # others have all of it, or the op frees others
            length = min(sequence.num_computed_tokens, len(sequence.tokens))
            own = isinstance(op, Free) and op.sequence == sequence.id
            return [*index.retention_ops(sequence, length)] if own else []
        if session is not None:
            self._set_pages(index, session, sequence, index.keys_of(sequence, op.length, parts=True))
        saves = [*index.save_ops(sequence, op.length), *index.save_states_ops(sequence)]
        if session is not None:
            session.stale_page_keys |= dict.fromkeys(index.states.keys_along(sequence))
        return [*saves, *index.retention_ops(sequence, op.length)]

    def _set_pages(self, index: OffloadIndex, session: SessionState, turn: Sequence, keys: list[bytes]) -> None:
        """Record the stored pages of a session's last turn, with their tokens."""
        still = set(keys)
        session.stale_page_keys |= {key: None for key in session.keys if key not in still}
        self._sessions.set_pages(session, keys)
        session.salt = turn.salt
        session.tokens = array("I", turn.tokens[: len(keys) * index.page_size])

    def export_session(self, name: SessionName) -> SessionCopy | None:
        """Export a session for another engine; None: there is none. Raises ValueError if that would find no KV."""
        session, tier = self._sessions.get(name), self._with_tier()
        if session is None:
            return None
        return SessionCopy(
            identity=tier.identity, name=name.name, turns=session.turns, salt=session.salt,
            tokens=_little(session.tokens).tobytes(),
        )  # fmt: skip

    def import_session(self, tenant: bytes, copy: SessionCopy, max_tokens: int) -> None:
        """Import a session of ``tenant`` with at most ``max_tokens`` tokens. Raises ValueError for an unusable one."""
        name, tier = SessionName(tenant, copy.name), self._with_tier()
        if copy.identity != tier.identity:
            raise ValueError("it is of another model, or of KV in another form, than this server's")
        if tenant_of(copy.salt) != tenant:
            raise ValueError("it is of another API key than yours")
        if self._sessions.get(name) is not None:
            raise ValueError(f"there is a session {name.name!r}: drop that first")
        tokens = array("I")
        if len(copy.tokens) > max_tokens * tokens.itemsize:
            raise ValueError(f"it has more than the {max_tokens} tokens of this server's --max-model-len")
        tokens.frombytes(copy.tokens[: len(copy.tokens) // tokens.itemsize * tokens.itemsize])
        session = self._sessions.get_or_create(name)
        session.turns, session.salt, session.tokens = max(1, copy.turns), copy.salt, _little(tokens)
        session.length = len(session.tokens)
        self._sessions.set_pages(session, tier.keys.whole(KeyedTokens(copy.salt, session.tokens), session.length))
        _, (session.location, *_) = tier.most_loadable(session.keys)
        session.stale_page_keys |= dict.fromkeys(tier.states.keys_along(_keyed(session)))

    def _with_tier(self) -> OffloadIndex:
        if self._offload_index is None or self._offload_index.backend == "host":
            raise ValueError(need_text(SESSION_FILE, ["--kv-offload dir="]))
        return self._offload_index

    def drop_session(self, name: SessionName, running: Iterable[Sequence]) -> list[SequenceOp] | None:
        """Drop a session and its KV that is not shared. Returns None for an unknown session.

        A turn of it among ``running`` will not be retained.
        """
        session = self._sessions.drop(name)
        if session is None:
            return None
        turns = [sequence for sequence in running if sequence.turn.session is session]
        for sequence in turns:
            sequence.do_not_cache = True
        leaf, ops = session.retained_sequence, list[SequenceOp]()
        if leaf is not None:
            ops.append(self._prefix_cache.evict(leaf))  # which takes it from the session
        if self._offload_index:
            index = self._offload_index
            filled = [key for s in turns for key in index.keys_of(s, index.num_filled_tokens(s))]
            own: list[Keyed] = [_keyed(session), *turns]
            states = [key for of in own for key in index.states.keys_along(of)]
            count = max((n for n, key in enumerate(session.keys, 1) if self._is_shared(key)), default=0)
            shared = {*session.keys[:count], *self._shared_states(index, session, own)}
            keys = dict.fromkeys([*session.keys, *session.stale_page_keys, *filled, *states])
            ops += index.delete_ops(
                -1 if leaf is None else leaf, [key for key in keys if key not in shared and not self._is_shared(key)]
            )
        return ops

    def _is_shared(self, key: bytes) -> bool:
        return self._sessions.has_page(key) or self._prefix_cache.has_page(key)

    def _sharing(self, page: bytes) -> Iterator[Keyed]:
        """Yield the tokens of other sessions with a page, and of sequences that are retained or will be."""
        yield from map(_keyed, self._sessions.with_page(page))
        yield from self._prefix_cache.sequences_with(page)

    def _shared_states(self, index: OffloadIndex, session: SessionState, own: Several[Keyed]) -> set[bytes]:
        """Return the keys of a session's states that others share, and of the partial pages that end with these.
        ``own``: its tokens.
        """
        shared, seen = set[bytes](), set[bytes]()
        for of in own:
            for length, keys in index.states.along(of, len(of.tokens)):
                seen.update(keys)
                first = length // index.page_size * index.page_size
                part = [*of.tokens[first:length]]
                if any([*x.tokens[first:length]] == part for x in self._sharing(index.keys.partial(of, first))):
                    shared.update(keys)
        pages = index.states.pages_before([*session.keys, *session.stale_page_keys])
        for key in pages.keys() - seen:  # of turns that were replaced, whose tokens are forgotten
            for other in self._sharing(pages[key]):
                shared.update(index.states.keys_of(key, other))
        return shared

    def _tier_of(self, session: SessionState) -> str:
        if session.retained_sequence is not None:
            return POOL
        tier = self._offload_index
        return tier.backend if tier and tier.num_loadable_pages(session.keys[:1], session.location) else NOWHERE


def _keyed(session: SessionState) -> KeyedTokens:
    """Return the tokens of a session's last turn."""
    return KeyedTokens(session.salt, session.tokens)


def _little(tokens: array[int]) -> array[int]:
    """Returns ``tokens`` in little-endian order."""
    if sys.byteorder == "little":
        return tokens
    swapped = array("I", tokens)
    swapped.byteswap()
    return swapped
