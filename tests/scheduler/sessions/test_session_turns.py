"""The requests that may continue a session: one turn at a time, and with the same conversation.

Covers: lamina/scheduler/sessions/session_table.py.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from scheduled import make

from lamina.scheduler.prefix_index import Holding, PrefixIndex
from lamina.scheduler.sessions import session_table
from lamina.scheduler.sessions.session_table import SessionName
from lamina.scheduler.sessions.session_turns import (
    SessionBusyError,
    SessionTurns,
    TurnTranscript,
    messages_transcript,
    prompt_transcript,
)

NAME = SessionName(b"me", "a")


def said(*texts: str) -> TurnTranscript:
    return messages_transcript([{"role": "user", "content": text} for text in texts])


def speak(turns: SessionTurns, what: TurnTranscript, name: SessionName = NAME, *, answered: bool = True) -> None:
    turns.begin(name, what)
    turns.end(name, answered=answered)


def test_a_turn_goes_on_with_all_that_was_sent_and_any_answer() -> None:
    turns = SessionTurns()
    speak(turns, said("hi"))
    speak(turns, said("hi", "the answer", "more"))
    speak(turns, said("hi", "the answer", "more"))  # asked again
    speak(turns, said("hi", "the answer", "more", "cut", "yet more"))


@pytest.mark.parametrize(
    "other",
    [
        said("ho", "there"),
        said("hi there"),
        said(),
        messages_transcript([{"role": "system", "content": "hi"}]),
        prompt_transcript("hi"),
    ],
    ids=["other", "longer message", "nothing", "other role", "other kind"],
)
def test_another_conversation_under_the_same_name_is_refused(other: TurnTranscript) -> None:
    turns = SessionTurns()
    speak(turns, said("hi"))
    with pytest.raises(ValueError, match="session_id 'a'.*does not begin with the messages of its last turn"):
        turns.begin(NAME, other)
    speak(turns, said("hi", "x"))  # it stayed where it was
    turns.drop_session(NAME)
    speak(turns, other)


def test_texts_and_tokens_go_on_by_their_beginning() -> None:
    for first, more, other in (("abc", "abcd", "abd"), ([1, 2], [1, 2, 3], [1, 3, 2]), ([256], [256, 0], [0, 256])):
        turns = SessionTurns()
        speak(turns, prompt_transcript(first))
        speak(turns, prompt_transcript(more))
        with pytest.raises(ValueError, match="does not begin"):
            turns.begin(NAME, prompt_transcript(other))


def test_one_turn_at_a_time_and_other_tenants_have_names_of_their_own() -> None:
    turns = SessionTurns()
    turns.begin(NAME, said("hi"))
    for again in (said("hi"), said("else")):
        with pytest.raises(SessionBusyError, match="session_id 'a': a turn of it is under way"):
            turns.begin(NAME, again)
    with pytest.raises(SessionBusyError, match="under way"):
        turns.drop_session(NAME)
    speak(turns, said("else"), SessionName(b"you", "a"))
    turns.end(NAME, answered=True)
    turns.end(NAME, answered=False)  # idempotent
    speak(turns, said("hi", "more"))


def test_a_turn_without_an_answer_leaves_the_session_where_it_was() -> None:
    turns = SessionTurns()
    speak(turns, said("hi"))
    speak(turns, said("hi", "wrong"), answered=False)
    speak(turns, said("hi", "right"))
    with pytest.raises(ValueError, match="does not begin"):
        turns.begin(NAME, said("hi", "wrong"))


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\ud800"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="session_id must be 1 to 256 printable characters"):
        SessionTurns().begin(SessionName(b"", name), said("hi"))


def test_names_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.scheduler.sessions.session_turns.MAX_SESSIONS", 2)
    monkeypatch.setattr(session_table, "MAX_SESSIONS", 2)
    index = PrefixIndex()
    turns, known, leaves = SessionTurns(), session_table.Sessions(index), list[Holding]()
    for name in "abc":
        speak(turns, said(name), SessionName(b"", name))
        leaves.append(Holding(make(ord(name), 4, 1), [], 4, 0.0))
        known.on_turn_ended(session := known.get_or_create(SessionName(b"", name)), leaves[-1], 4)
        known.set_pages(session, [b"first", name.encode()])
    assert [s.name.name for s in known.list_all()] == ["b", "c"]
    assert [leaf.session is not None for leaf in leaves] == [False, True, True], "its KV is as that of any other prefix"
    assert [known.has_page(key) for key in (b"first", b"a", b"b", b"c")] == [True, False, True, True]
    for name in "bc":
        known.drop(SessionName(b"", name))
    assert not any(known.has_page(key) for key in (b"first", b"b", b"c"))
    speak(turns, said("z"), SessionName(b"", "a"))


def test_a_page_of_a_session_takes_little_memory() -> None:
    """A full table has 16,384 sessions, whose pages may be in storage no more."""
    known, pages = session_table.Sessions(PrefixIndex()), 256
    sessions = [known.get_or_create(SessionName(b"", str(number))) for number in range(16)]
    keys = [[number.to_bytes(4, "big") * 8 for number in range(n, n + pages)] for n in range(0, 16 * pages, pages)]
    tracemalloc.start()
    try:
        for session, own in zip(sessions, keys, strict=True):
            known.set_pages(session, own)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(known.has_page(key) for own in keys for key in own)
    assert nbytes < 128 * 16 * pages


def test_sessions_that_come_are_remembered_up_to_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.scheduler.sessions.session_turns.MAX_SESSIONS", 2)
    turns, old = SessionTurns(), SessionTurns()
    speak(old, said("hi"))
    for name in "abc":
        with turns.import_session(SessionName(b"", name), old.last_transcript(NAME)):
            pass
    assert [turns.last_transcript(SessionName(b"", name)) for name in "abc"] == [None, *[old.last_transcript(NAME)] * 2]


def test_no_turn_begins_while_its_session_comes() -> None:
    turns = SessionTurns()
    speak(turns, said("hi"))
    before = turns.last_transcript(NAME)

    def refused() -> None:
        with turns.import_session(NAME, None):
            with pytest.raises(SessionBusyError):
                turns.begin(NAME, said("hi"))
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        refused()
    assert turns.last_transcript(NAME) == before, "as it was"
    with turns.import_session(NAME, None):
        pass
    speak(turns, said("something else"))


def test_what_a_message_is_made_of() -> None:
    parts: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert messages_transcript(parts) == messages_transcript([dict(reversed(list(parts[0].items())))])
    assert messages_transcript(parts) != said("hi")
