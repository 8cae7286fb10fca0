"""Training text that every Python installation carries: the standard library's own sources and help topics.

The text depends on the Python version alone (``digest`` tells two corpora apart). One file in thirty is held out by a
hash of its name, so that training and evaluation agree on the split without a list.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

_HELD_OUT_EVERY = 30
# Foreign packages, tests (not installed everywhere), code tables, and files that the build of the interpreter writes.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__phello__",
}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "lib-dynload", "_bundled", "sitecustomize", "usercustomize")
_MAX_QUESTIONS_PER_FILE = 60


def documents() -> dict[str, str]:
    """All documents by name, in order of name: ``json/decoder.py`` -> source, ``topics/assert`` -> help text."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in name.parts):
            continue
        try:
            texts[name.as_posix()] = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:  # A few old files declare another encoding.
            continue
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    texts.update({f"topics/{name}": text for name, text in sorted(topics.items())})
    return texts


def split(texts: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split documents by a hash of their names into (training, held out)."""
    held = {name for name in texts if int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_EVERY == 0}
    return {n: t for n, t in texts.items() if n not in held}, {n: t for n, t in texts.items() if n in held}


def held_out_text() -> str:
    """The held-out documents as one text, in order of name."""
    return "\n".join(split(documents())[1].values())


def digest(texts: dict[str, str]) -> str:
    """SHA-256 over names and texts."""
    state = hashlib.sha256()
    for name, text in texts.items():
        state.update(f"{name}\0{text}\0".encode())
    return state.hexdigest()


def questions(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs: what a public function or class does, answered by its docstring's first paragraph."""
    for name, text in texts.items():
        if not name.endswith(".py"):
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for qualified, summary in list(_summaries(ast.parse(text), module))[:_MAX_QUESTIONS_PER_FILE]:
            yield f"What does {qualified} do?", summary


def _summaries(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        qualified = f"{prefix}.{child.name}"
        summary = (ast.get_docstring(child) or "").split("\n\n")[0]
        if 10 <= len(summary) <= 300:
            yield qualified, " ".join(summary.split())
        if isinstance(child, ast.ClassDef):
            yield from _summaries(child, qualified)
