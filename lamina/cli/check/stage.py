"""On which settings of one engine are run: the engine, who looks on, and who ends its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from lamina.kv.store.folder import StoreFolder, store_secret
from lamina.kv.store.upkeep import digests
from lamina.llm import LLM
from lamina.observe.tripwire import Tripwire

from .matrix import Setting
from .recorded import RecordedWire
from .resized import Resized
from .struck import Struck


class Stage(NamedTuple):
    """``tripwire``: of its workers, where one is to die. ``folder``: where KV of prompts is kept that is looked at."""

    llm: LLM
    wire: RecordedWire
    tripwire: Tripwire | None
    folder: Path

    def runner(self, setting: Setting) -> Resized | Struck:
        """Who runs the prompts."""
        if setting.fault is None or self.tripwire is None:
            return Resized(self.llm, setting.changes)
        return Struck(self.llm, self.wire, self.tripwire, setting.fault)

    def pages(self, prompts: Sequence[Sequence[int]]) -> Mapping[tuple[int, int], bytes]:
        """Prompt and number of each whole page of it that was kept -> SHA-256 of its K and V in all layers, as memory
        workers had them.
        """
        self.llm.engine.rest()  # until all is saved
        tier = self.llm.engine.scheduler.tier
        if tier is None:
            return {}
        with closing(StoreFolder(str(self.folder / "kv"), make=False)) as store:
            there = digests(store, store_secret(store, make=False))
        each = ((p, n, key) for p, ids in enumerate(prompts) for n, key in enumerate(tier.keys_behind(b"", ids)))
        return {(p, n): there[key] for p, n, key in each if key in there}
