"""Sessions that go from server to server: who may take one over, and the file that it lies in.

Covers: lamina/cli/operate/session_files.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from scheduled import make

from lamina.cli.launch import main
from lamina.cli.operate.session_files import read_session, write_session
from lamina.config.partition import KvShards
from lamina.kv.page_keys import ChainRoot
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.offload_messages import OffloadFacts
from lamina.protocol.step_plan import Truncate
from lamina.scheduler.feature import Leaving
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.scheduler.sessions.session_table import SessionName

TENANT, PAGE = b"t" * 32, 4
MOST = 2 * PAGE  # tokens that a server takes
NAME = SessionName(TENANT, "tea")


def leaves(
    secret: bytes = b"s", identity: bytes = b"i", medium: str = "file"
) -> tuple[SessionCache, PrefixCache, OffloadIndex]:
    ledger = BlockTables([0], [64], PAGE)
    facts = OffloadFacts(secret=secret * 32, identity=identity, page_size=PAGE, pages=[[]], backend=medium)
    prefixes = PrefixCache(ledger, PAGE, prefix_index=PrefixIndex(ChainRoot(facts.secret, facts.identity)))
    tier = OffloadIndex(facts, ledger, [[0]], prefixes.prefix_index)
    return SessionCache(prefixes, ledger, tier), prefixes, tier


def spoken(of: tuple[SessionCache, PrefixCache, OffloadIndex]) -> list[int]:
    """A turn of NAME has ended: its tokens, of two pages and one."""
    sequence = make(1, 2 * PAGE + 1, 1)
    sequence.id, sequence.turn.session, sequence.salt = 1, of[1].sessions.get_or_create(NAME), TENANT
    of[1].sessions.on_turn_began(sequence.turn.session, "none")
    sequence.finish("stop")
    of[0].on_leave(Leaving(sequence, Truncate(1, 2 * PAGE)))
    return sequence.tokens


def test_its_pages_are_those_of_a_prompt_in_the_next_store() -> None:
    old, new = leaves(), leaves(secret=b"x")
    tokens = spoken(old)
    copy = old[0].export_session(NAME)
    assert copy is not None
    new[0].import_session(TENANT, copy, MOST)
    again = make(2, 2 * PAGE + 1, 1)
    again.tokens, again.salt = tokens, TENANT
    session = new[1].sessions.get(NAME)
    assert session is not None
    assert session.keys == new[2].keys_of(again, 2 * PAGE)
    assert session.keys != old[1].sessions.get_or_create(NAME).keys, "of another secret"
    assert [(f.name, f.turns, f.tokens, f.tier) for f in new[0].list_tenant(TENANT)] == [("tea", 1, 2 * PAGE, "none")]
    assert new[0].export_session(NAME) == copy


def test_who_may_not_take_it() -> None:
    old = leaves()
    spoken(old)
    copy = old[0].export_session(NAME)
    assert copy is not None
    assert old[0].export_session(SessionName(b"", "tea")) is None
    for of, tenant, why in (
        (leaves(identity=b"j"), TENANT, "of another model"), (leaves(), b"", "of another API key"),
        (leaves(), b"u" * 32, "of another API key"), (old, TENANT, "there is a session 'tea'"),
        (leaves(medium="host"), TENANT, "--kv-offload dir="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            of[0].import_session(tenant, copy, MOST)
        assert of is old or not of[0].list_tenant(tenant)
    new = leaves()
    with pytest.raises(ValueError, match=f"more than the {2 * PAGE - 1} tokens of this server's --max-model-len"):
        new[0].import_session(TENANT, copy, 2 * PAGE - 1)
    new[0].import_session(TENANT, replace(copy, tokens=copy.tokens[:-1]), MOST)
    assert new[1].sessions.get_or_create(NAME).length == 2 * PAGE - 1, "of what is cut off nothing is found"


def test_a_session_in_storage_alone_is_counted_after_its_kv_shard_has_gone() -> None:
    each, one = (KvShards((True, False)), KvShards((False, True))), (KvShards(),)
    ledger = BlockTables([0, 0], [64, 64], PAGE, each)
    facts = OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[[], []])
    prefixes = PrefixCache(ledger, PAGE)
    tier = OffloadIndex(facts, ledger, [[0], [1]], prefixes.prefix_index)
    of = SessionCache(prefixes, ledger, tier), prefixes, tier
    spoken(of)
    session = prefixes.sessions.get_or_create(NAME)
    session.location = KvLocation(1)
    tier.sync(replace(facts, pages=[[], session.keys]), [[0], [1]])
    assert of[0].count_by_tier == {"host": 1}
    ledger.replace_with(BlockTables([0], [64], PAGE, one))
    tier.sync(replace(facts, pages=[session.keys]), [[0]])
    assert of[0].count_by_tier.total() == 1


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    return str(path)


def test_a_file_is_sealed_and_for_nobody_else(tmp_path: Path, key: str) -> None:
    path = tmp_path / "tea.session"
    write_session(str(path), key, b"all that was said")
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"said" not in path.read_bytes()
    assert read_session(str(path), key) == b"all that was said"
    with pytest.raises(ValueError, match=r"^--file .*: it is there: name a new one"):
        write_session(str(path), key, b"")
    sealed = path.read_bytes()
    for wrong in (b"", sealed[:20], sealed[:-1], sealed[:-1] + bytes([sealed[-1] ^ 1]), b"x" + sealed[1:]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="it is no exported session, is damaged, or was made with another"):
            read_session(str(path), key)
    path.write_bytes(sealed)
    Path(key).write_text("cd" * 32)
    with pytest.raises(ValueError, match="another --key-file"):
        read_session(str(path), key)
    Path(key).chmod(0o644)
    with pytest.raises(ValueError, match=r"^--key-file .*: others may read it"):
        read_session(str(path), key)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("export http://a", "need the session_id"),
        ("export http://a tea", "sessions export or import needs --file, because "),
        ("import http://a tea --file f --key-file k", "import take none"),
        ("list http://a --file f", "--file needs sessions export or import, because "),
        ("import http://a --file f", "--file needs --key-file, because "),
        ("drop http://a tea --key-file k", "needs --file, because "),
    ],
)  # fmt: skip
def test_words_that_do_not_go_together(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", *words.split(), "--dry-run"]) == 2
    assert why in capsys.readouterr().err
