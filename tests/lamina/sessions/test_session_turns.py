"""Who may go on with a session: one turn at a time, and with the same conversation."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.engine.conversations import sessions
from lamina.engine.conversations.sessions import SessionName
from lamina.engine.conversations.turns import Said, SessionBusyError, Turns, said_in, said_of

NAME = SessionName(b"me", "a")


def said(*texts: str) -> Said:
    return said_in([{"role": "user", "content": text} for text in texts])


def speak(turns: Turns, what: Said, name: SessionName = NAME, *, answered: bool = True) -> None:
    turns.begin(name, what)
    turns.end(name, answered=answered)


def test_a_turn_goes_on_with_all_that_was_sent_and_any_answer() -> None:
    turns = Turns()
    speak(turns, said("hi"))
    speak(turns, said("hi", "the answer", "more"))
    speak(turns, said("hi", "the answer", "more"))  # asked again
    speak(turns, said("hi", "the answer", "more", "cut", "yet more"))


@pytest.mark.parametrize(
    "other",
    [said("ho", "there"), said("hi there"), said(), said_in([{"role": "system", "content": "hi"}]), said_of("hi")],
    ids=["other", "longer message", "nothing", "other role", "other kind"],
)
def test_another_conversation_under_the_same_name_is_refused(other: Said) -> None:
    turns = Turns()
    speak(turns, said("hi"))
    with pytest.raises(ValueError, match="session_id 'a'.*does not begin with the messages of its last turn"):
        turns.begin(NAME, other)
    speak(turns, said("hi", "x"))  # it stayed where it was
    turns.drop(NAME)
    speak(turns, other)


def test_texts_and_tokens_go_on_by_their_beginning() -> None:
    for first, more, other in (("abc", "abcd", "abd"), ([1, 2], [1, 2, 3], [1, 3, 2]), ([256], [256, 0], [0, 256])):
        turns = Turns()
        speak(turns, said_of(first))
        speak(turns, said_of(more))
        with pytest.raises(ValueError, match="does not begin"):
            turns.begin(NAME, said_of(other))


def test_one_turn_at_a_time_and_other_tenants_have_names_of_their_own() -> None:
    turns = Turns()
    turns.begin(NAME, said("hi"))
    for again in (said("hi"), said("else")):
        with pytest.raises(SessionBusyError, match="session_id 'a': a turn of it is under way"):
            turns.begin(NAME, again)
    with pytest.raises(SessionBusyError, match="under way"):
        turns.drop(NAME)
    speak(turns, said("else"), SessionName(b"you", "a"))
    turns.end(NAME, answered=True)
    turns.end(NAME, answered=False)  # idempotent
    speak(turns, said("hi", "more"))


def test_a_turn_without_an_answer_leaves_the_session_where_it_was() -> None:
    turns = Turns()
    speak(turns, said("hi"))
    speak(turns, said("hi", "wrong"), answered=False)
    speak(turns, said("hi", "right"))
    with pytest.raises(ValueError, match="does not begin"):
        turns.begin(NAME, said("hi", "wrong"))


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\ud800"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="session_id must be 1 to 256 printable characters"):
        Turns().begin(SessionName(b"", name), said("hi"))


def test_names_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.conversations.turns.MOST_SESSIONS", 2)
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 2)
    turns, known = Turns(), sessions.Sessions()
    for name in "abc":
        speak(turns, said(name), SessionName(b"", name))
        known.sleep(known.of(SessionName(b"", name)), ord(name), 4, sessions.FIRST)
    assert [s.name.name for s in known.all()] == ["b", "c"]
    assert known.owner(ord("a")) is None, "its KV is as that of any other prefix"
    speak(turns, said("z"), SessionName(b"", "a"))


def test_sessions_that_come_are_remembered_up_to_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.conversations.turns.MOST_SESSIONS", 2)
    turns, old = Turns(), Turns()
    speak(old, said("hi"))
    for name in "abc":
        with turns.bring(SessionName(b"", name), old.spoken(NAME)):
            pass
    assert [turns.spoken(SessionName(b"", name)) for name in "abc"] == [None, *[old.spoken(NAME)] * 2]


def test_no_turn_begins_while_its_session_comes() -> None:
    turns = Turns()
    speak(turns, said("hi"))
    before = turns.spoken(NAME)

    def refused() -> None:
        with turns.bring(NAME, None):
            with pytest.raises(SessionBusyError):
                turns.begin(NAME, said("hi"))
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        refused()
    assert turns.spoken(NAME) == before, "as it was"
    with turns.bring(NAME, None):
        pass
    speak(turns, said("something else"))


def test_what_a_message_is_made_of() -> None:
    parts: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert said_in(parts) == said_in([dict(reversed(list(parts[0].items())))])
    assert said_in(parts) != said("hi")
