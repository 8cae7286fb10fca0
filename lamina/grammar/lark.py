"""Pieces of grammars in Lark: what comes before a structure, and what may come in its place. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

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


def up_to(rule: str, end: str, specials: Specials, *, begin: str = "") -> str:
    """Return a rule for the text up to the first ``end``; it begins with spaces and ``begin``, if that is given."""
    if end in specials or begin in specials:
        first = rf"/[ \t\r\n]{{0,4}}/ {sequence(begin, specials)} " if begin else ""
        return rf"{rule}: {first}/(.|\n)*/ {sequence(end, specials)}" + "\n"
    first = rf"[ \t\r\n]{{0,4}}{_literal(begin)}" if begin else ""
    return rf"{rule}[lazy]: /{first}(.|\n)*{_literal(end)}/" + "\n"


def one_of(rule: str, begins: Iterable[str], specials: Specials) -> str:
    """Return a rule for any text that begins with one of ``begins``."""
    first = " | ".join(sequence(begin, specials) for begin in begins)
    return f"{rule}: ({first}) {anything(specials)}\n"


def _literal(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\ ", " ").replace("\\\n", "\\n").replace("\n", "\\n")
