"""The sessions of an engine, as its server and ``LLM`` see them."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sessions.session_table import SessionCopy, SessionInfo, SessionName, Sessions, SessionState


class EngineSessions:
    """The sessions of all tenants of one scheduler."""

    def __init__(self, scheduler: Scheduler, table: Sessions, max_tokens: int) -> None:
        """``max_tokens``: of a session that comes from another engine."""
        self._scheduler, self._table, self._max_tokens = scheduler, table, max_tokens

    @property
    def hits(self) -> Mapping[str, int]:
        """The turns after the first one of a session, by the tier that had its KV."""
        return self._table.hits

    @property
    def waits(self) -> Mapping[str, float]:
        """The seconds that these turns waited for their first row, by tier."""
        return self._table.waits

    @property
    def count_by_tier(self) -> Mapping[str, int]:
        """The number of sessions, by the fastest tier that has their KV."""
        return self._cache.count_by_tier

    def list_tenant(self, tenant: bytes) -> list[SessionInfo]:
        """Return the sessions of a tenant."""
        return self._cache.list_tenant(tenant)

    def get_or_create(self, name: SessionName) -> SessionState:
        """Return a session; a new one if there is none."""
        return self._table.get_or_create(name)

    def drop(self, name: SessionName) -> bool:
        """Drop a session and its KV that is not shared. Returns False for an unknown one.

        Blocks are freed with the next step, or by ``Engine.release_idle_blocks``.
        """
        ops = self._cache.drop_session(name, self._scheduler.running)
        self._scheduler.add_pending_ops(ops or [])
        return ops is not None

    def export(self, name: SessionName) -> SessionCopy | None:
        """Return a session for another engine; None: there is none. Raises ValueError if that would find no KV."""
        return self._cache.export_session(name)

    def import_copy(self, tenant: bytes, copy: SessionCopy) -> None:
        """Take over a session for ``tenant``. Raises ValueError for an unusable one."""
        self._cache.import_session(tenant, copy, self._max_tokens)

    @property
    def _cache(self) -> SessionCache:
        return self._scheduler.features[SessionCache]
