"""Reads comments and strings of Python and C++ files by regular expressions, in a tenth of the time of a parser."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

PYTHON = re.compile(
    r"#[^\n]*|[rbfu]{0,2}(?:'''(?:[^\\]|\\.)*?'''|'(?:[^'\\\n]|\\.)*'|"
    r'"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*")',
    re.DOTALL | re.IGNORECASE,
)
CPP = re.compile(r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:[^\"\\\n]|\\.)*\"|(?<!\d)'(?:[^'\\\n]|\\.)+'", re.DOTALL)
LEXERS = {".py": PYTHON, ".cpp": CPP, ".h": CPP, ".cu": CPP, ".cuh": CPP}
MARKS = re.compile(r"^[ \t]*(?:#+!?|//+|/\*+|\*+/?) ?|\s*\*/$", re.MULTILINE)  # of comments, at the ends of a line
QUOTES = re.compile(r"""^[rbfu]*(?P<mark>'''|\"""|'|")|('''|\"""|'|")$""", re.IGNORECASE)


class Piece(NamedTuple):
    kind: str  # comment, docstring or string
    line: int
    text: str


def pieces(suffix: str, code: str) -> Iterator[Piece]:
    """Yields docstrings, comments, those on consecutive lines as one, and strings, adjacent ones as one."""
    last, start, end, text = "", 0, 0, ""
    for found in LEXERS[suffix].finditer(code):
        kind, between = kind_of(code, found), code[end : found.start()]
        if kind == last and joined(kind, code, start, between):
            text += "\n" * between.count("\n") + found.group() if kind == "comment" else bare(found.group())
        else:
            if last:
                yield Piece(last, code.count("\n", 0, start) + 1, shown(last, text))
            last, start, text = kind, found.start(), found.group() if kind == "comment" else bare(found.group())
        end = found.end()
    if last:
        yield Piece(last, code.count("\n", 0, start) + 1, shown(last, text))


def kind_of(code: str, found: re.Match[str]) -> str:
    if found.group().startswith(("#", "//", "/*")):
        return "comment"
    if found.group().lstrip("rR").startswith('"""'):
        before = re.sub(r"(?m)#.*$", "", code[max(0, found.start() - 400) : found.start()]).rstrip()
        return "docstring" if before.endswith(":") or not before else "string"
    return "string"


def joined(kind: str, code: str, start: int, between: str) -> bool:
    """Tells whether a piece goes on: strings side by side, or a comment on the line after a comment's own line."""
    if between.strip():
        return False
    own_line = not code[code.rfind("\n", 0, start) + 1 : start].strip()
    return kind == "string" or (kind == "comment" and own_line and between.count("\n") == 1)


def bare(string: str) -> str:
    return QUOTES.sub("", string)


def shown(kind: str, text: str) -> str:
    """The text as a reader sees it, with as many lines as before."""
    if kind == "comment":
        return textwrap.dedent(MARKS.sub("", text))
    if kind == "docstring":
        first, newline, rest = text.partition("\n")
        return first.strip() + newline + textwrap.dedent(rest)
    return re.sub(r"\\(.)", r"\1", re.sub(r"\{[^{}]*\}", "X", text.replace("\\n", "\n")))
