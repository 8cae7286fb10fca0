"""Pieces of grammars in Lark: what comes before a structure, and what may come in its place. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

Specials = Mapping[str, int]  # text of a special token -> its id: the library's plain text has none of them


def sequence(text: str, specials: Specials) -> str:
    """Return ``text`` as items of a rule: special tokens by their ids, and the rest as it is."""
    marks = sorted(specials, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{specials[part]}]>" if part in specials else json.dumps(part) for part in parts if part)


def anything(specials: Specials) -> str:
    """Return an item for any text, with special tokens."""
    ids = ",".join(map(str, sorted(specials.values())))
    return rf"(/(.|\n)+/ | <[{ids}]>)*" if ids else r"/(.|\n)*/"


def up_to(rule: str, ends: Sequence[str], specials: Specials, *, begins: Sequence[str] = ()) -> str:
    """Return a rule for the text up to the first one of ``ends``; it begins with spaces and one of ``begins``, if there
    are any.
    """
    if any(mark in specials for mark in (*ends, *begins)):
        first = rf"/[ \t\r\n]{{0,4}}/ ({_any(begins, specials)}) " if begins else ""
        return rf"{rule}: {first}/(.|\n)*/ ({_any(ends, specials)})" + "\n"
    first = rf"[ \t\r\n]{{0,4}}({_literals(begins)})" if begins else ""
    return rf"{rule}[lazy]: /{first}(.|\n)*({_literals(ends)})/" + "\n"


def _any(texts: Sequence[str], specials: Specials) -> str:
    return " | ".join(sequence(text, specials) for text in texts)


def one_of(rule: str, begins: Sequence[str], specials: Specials) -> str:
    """Return a rule for any text that begins with one of ``begins``."""
    return f"{rule}: ({_any(begins, specials)}) {anything(specials)}\n"


def _literals(texts: Sequence[str]) -> str:
    return "|".join(map(_literal, texts))


def _literal(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\ ", " ").replace("\\\n", "\\n").replace("\n", "\\n")
