"""Finds sentences that are hard to read in documents, docstrings, comments, and in the product's texts.

A sentence has at most 30 words and one semicolon, and none of the words below. Code spans count as one word.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from faults import Fault, main
from texts import pieces

WORDS = 30
SEMICOLONS = 1
BANNED = re.compile(
    r"\b(behind|beside|told|said|whoever|somebody|nobody|made good|c[oa]m(?:e|es|ing) to rest)\b", re.IGNORECASE
)
ITEM = re.compile(r"\s*(?:[-*+•]|\d+[.)])\s+")  # begins an item of a list
FENCE = re.compile(r"\s*(?:```|~~~)")
SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
URL = re.compile(r"\w+://[^\s)>\]]*[^\s)>\].,;:]")
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)(?<!\betc)[.!?][)\"'*_]*(?:\s+|$)")
Line = tuple[int, str]


def blocks(first: int, text: str) -> Iterator[list[Line]]:
    """Paragraphs, items of lists, headings and cells of tables, as numbered lines; code is left out."""
    block, fenced, code = list[Line](), False, False
    for number, line in enumerate(text.split("\n"), first):
        if FENCE.match(line):
            fenced = not fenced
        code = (code or not block) and line.startswith("    ") and not ITEM.match(line)
        begins = ITEM.match(line) or line.startswith(("#", "|", ">>>"))
        if block and (fenced or begins or not line.strip() or FENCE.match(line)):
            yield block
            block = []
        if line.startswith("|"):
            yield from ([(number, cell)] for cell in SPAN.sub("x", line).split("|"))
        elif line.startswith("#"):
            yield [(number, line)]
        elif line.strip() and not (fenced or code or FENCE.match(line) or line.startswith(">>>")):
            block.append((number, ITEM.sub("", line, count=1) if begins else line))
    if block:
        yield block


def sentences(block: list[Line]) -> Iterator[Line]:
    text = SPAN.sub(lambda span: "x" + "\n" * span.group().count("\n"), "\n".join(line for _, line in block))
    text = URL.sub("URL", LINK.sub(r"\1", text))
    start = 0
    for end in END.finditer(text):
        yield block[0][0] + text.count("\n", 0, start), text[start : end.end()]
        start = end.end()
    if text[start:].strip():
        yield block[0][0] + text.count("\n", 0, start), text[start:]


def texts(path: str, text: str) -> Iterator[Line]:
    """The texts of a file that people read. Strings of tests are data."""
    suffix = Path(path).suffix
    if suffix == ".md":
        yield 1, text
    else:
        for piece in pieces(suffix, text):
            code = path.startswith("tests/") or piece.text.rstrip().endswith(";")  # such as SQL
            if piece.kind != "string" or not code:
                yield piece.line, piece.text


def lint(path: str, text: str) -> Iterator[Fault]:
    """Yields a fault for each sentence and rule, and for each banned word."""
    for first, prose in texts(path, text):
        for line, sentence in (line for block in blocks(first, prose) for line in sentences(block)):
            shown = " ".join(sentence.split())
            if (words := sum(any(map(str.isalnum, word)) for word in shown.split())) > WORDS:
                yield Fault(path, line, f"more than {WORDS} words", f"({words}) {shown}")
            if shown.count(";") > SEMICOLONS:
                yield Fault(path, line, "more than one semicolon", shown)
            for word in BANNED.findall(shown):
                yield Fault(path, line, f"the word {word.lower()}", shown)


if __name__ == "__main__":
    sys.exit(main(lint))
