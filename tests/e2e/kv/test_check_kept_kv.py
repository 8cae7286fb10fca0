"""``lamina-launch check`` on KV that outlives its request: kept promises on five families, and broken ones that must
turn it red.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import make_config, replace_options
from lamina.kv.page_keys import KEY_TOKENS, page_key
from lamina.kv.storage.host import HostStorage
from lamina.protocol.blocks.extents import Extents
from lamina.protocol.kv_placement import KvLocation
from lamina.scheduler import prefix_index
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.tools.check.matrix import BASE, BASE_OPTIONS, FIXED, Setting, kv_reuse_settings
from lamina.tools.check.runner import Check

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
KEPT = ("prefix cache", "restore", "preemption")
KEEPING = [
    pytest.param("gpt2", 0, "auto", id="learned positions", marks=pytest.mark.slow),
    pytest.param("gemma2", 250, "auto", id="a window that prompts fit in"),
    pytest.param("falcon-alibi", 0, "auto", id="positions in the scores", marks=pytest.mark.slow),
    pytest.param("falcon-mqa", 0, "auto", id="one KV head", marks=pytest.mark.slow),
    pytest.param("llama-gqa", 0, "int8", id="8 bits", marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "window", "dtype"), KEEPING)
def test_families_keep_what_is_promised_of_kept_kv(name: str, window: int, dtype: str, tmp_path: Path) -> None:
    (family,) = [f for f in FAMILIES if f.name == name]
    more = {"sliding_window": window} if window else {}
    replace(family, options={**family.options, **more}).build().save_pretrained(tmp_path)
    config = replace_options(EngineConfig(), BASE_OPTIONS)
    verdicts = list(Check(str(tmp_path), config, [], 16, 0).run([BASE, *kv_reuse_settings(dtype)]))
    assert all(v.held for v in verdicts), [(v.axis, v.setting, v.note) for v in verdicts if not v.held]
    assert [v.exactness for v in verdicts if v.axis in KEPT] == ["bitwise"] * 5


@pytest.fixture(scope="module")
def keeping(llama_path: Path) -> tuple[Check, list[Setting]]:
    """Two prompts whose second pages are alike, and whose first ones are not; and settings that load pages."""
    pages = [[(7 * i + n) % 90 + 5 for i in range(128)] for n in (1, 40, 3)]
    prompts: Any = [[*first, *pages[2], 9] for first in pages[:2]]
    comparison = Check(str(llama_path), make_config(BASE_OPTIONS), prompts, max_tokens=8, seed=1)
    restored = [s for s in kv_reuse_settings("auto") if s.axis == "restore"]
    assert [v.held for v in comparison.run([BASE, FIXED, *restored])] == [True] * 4
    return comparison, restored


@pytest.mark.long
def test_a_bit_that_flips_behind_its_checksum_is_found(
    keeping: tuple[Check, list[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = HostStorage.read

    def flip(self: HostStorage, key: bytes, into: Any) -> None:
        read(self, key, into)
        for fragment in list(into)[:1]:
            into[fragment][3] ^= 0x10  # of an exponent

    monkeypatch.setattr(HostStorage, "read", flip)
    comparison, restored = keeping
    assert [v.held for v in comparison.run(restored)] == [True, False]


@pytest.mark.long
def test_keys_that_know_no_parent_are_found(
    keeping: tuple[Check, list[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second page of the second prompt is taken for that of the first one."""

    def orphans(parent: bytes, first: int, tokens: list[int]) -> Iterator[bytes]:
        for at in range(0, len(tokens), KEY_TOKENS):
            yield page_key(b"p" * 32, first + at, tokens[at : at + KEY_TOKENS])

    monkeypatch.setattr(prefix_index, "prefix_keys", orphans)
    comparison, restored = keeping
    assert [v.held for v in comparison.run(restored)] == [True, False]


@pytest.mark.long(but=["request"])
@pytest.mark.parametrize("partition", ["request", "token"])
def test_a_fork_in_the_wrong_lane_is_found(
    partition: str, keeping: tuple[Check, list[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows say that its shared tokens lie in the KV shard next to its source's, and the plan is accepted."""
    comparison, _ = keeping
    split = {"memory_workers": 2, "partition": partition}
    cached = [replace(s, options={**s.options, **split}) for s in kv_reuse_settings("auto") if s.axis == "prefix cache"]
    assert [(v.held, v.exactness) for v in comparison.run(cached)] == [(True, "bitwise")] * 2
    match = PrefixCache.longest_cached

    def stray(self: PrefixCache, beginnings: Any) -> Any:
        hit = match(self, beginnings)
        return hit and hit._replace(locations=tuple(KvLocation(1 - place.kv_shard) for place in hit.locations))

    monkeypatch.setattr(PrefixCache, "longest_cached", stray)
    monkeypatch.setattr(Extents, "same_owners", lambda *_: True)
    assert [v.held for v in comparison.run(cached)] == [True, False]
