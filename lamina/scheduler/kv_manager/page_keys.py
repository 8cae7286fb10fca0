"""The keys of a sequence's pages, as the driver knows them (kv.page_keys). Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence as Several

from lamina.kv.page_keys import page_key, root_key, tenant_of, tenant_tag
from lamina.protocol.offload_messages import OffloadFacts
from lamina.scheduler.sequence import Sequence


class PageKeys:
    """The keys of one store. Those of a sequence stay with it, as its tokens do not change."""

    def __init__(self, facts: OffloadFacts) -> None:
        self._secret, self._identity, self._page = facts.secret, facts.identity, facts.page_size
        self._first = 0 if facts.is_complete else 1  # the first page that is looked for where it is not whole
        self._tags: dict[bytes, bytes] = {}  # of tenants
        self.era = facts.era  # of keys that are made from now on

    def whole_page_keys(self, sequence: Sequence, length: int) -> list[bytes]:
        """Return the keys of the whole pages of its first ``length`` tokens."""
        keys, page = sequence.page_keys, self._page
        while len(keys) < length // page:
            at = len(keys) * page
            parent = keys[-1] if keys else self.root_key(sequence.salt, sequence.salt)
            keys.append(page_key(parent, at // page, sequence.tokens[at : at + page]))
        return keys[: length // page]

    def keys_after(self, salt: bytes, tokens: Several[int]) -> list[bytes]:
        """Return the keys of the whole pages of ``tokens``, of a prompt with ``salt``."""
        keys, parent = list[bytes](), self.root_key(salt, salt)
        for at in range(0, len(tokens) // self._page * self._page, self._page):
            parent = page_key(parent, at // self._page, tokens[at : at + self._page])
            keys.append(parent)
        return keys

    def partial_page_key(self, sequence: Sequence, length: int) -> list[bytes]:
        """Return the key of the partial page with which its first ``length`` tokens end, if there is one. A first page
        has none, unless the store has all prompts.
        """
        number, more = divmod(length, self._page)
        if number < self._first or not more:
            return []
        if length not in sequence.partial_page_keys:
            whole, tokens = self.whole_page_keys(sequence, length), sequence.tokens[length - more : length]
            parent = whole[-1] if whole else self.root_key(sequence.salt, sequence.salt)
            sequence.partial_page_keys[length] = page_key(parent, number, tokens)
        return [sequence.partial_page_keys[length]]

    def drop(self, sequence: Sequence) -> None:
        """Its tokens, or the era, are other ones from now on."""
        sequence.page_keys.clear()
        sequence.partial_page_keys.clear()

    def root_key(self, owner: bytes, salt: bytes) -> bytes:
        """The parent of a first page with ``salt``, which the tenant has whose prompts have the salt ``owner``."""
        return root_key(self._secret, self._identity, self.tenant_tag(owner), salt, self.era)

    def tenant_tag(self, salt: bytes) -> bytes:
        """Return the tag of the tenant of a prompt with ``salt``."""
        tenant = tenant_of(salt)
        if tenant not in self._tags:
            self._tags[tenant] = tenant_tag(self._secret, tenant)
        return self._tags[tenant]
