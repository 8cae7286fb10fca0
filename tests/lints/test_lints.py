"""The lints of text find one fault of each kind, and pass clean files."""

from __future__ import annotations

import ast
import inspect
import io
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import docstrings
import faults
import prose
import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import pieces

LONG = "A sentence of " + "many " * 27 + "words."  # 31 words
SEMICOLONS = "One thought; another one; and a third."
WORD = "It is behind the others."
WHERE = {
    "a document": ("docs/a.md", "# Title\n\n{}\n"),
    "a document's list": ("README.md", "Text:\n- one\n- {}\n"),
    "a document's table": ("docs/b.md", "| a | b |\n|---|---|\n| x | {} |\n"),
    "a docstring": ("lamina/a.py", 'def f() -> None:\n    """{}"""\n'),
    "a docstring of a test": ("tests/a.py", '"""{}"""\n'),
    "a comment": ("netstack/a.py", "# {}\nx = 1\n"),
    "a comment after code": ("converter/a.py", 'x = "#"  # {}\n'),
    "a help text": ("lamina/cli/a.py", 'p.add_argument("--x", help="{}")\n'),
    "an error": ("lamina/a.py", 'raise ValueError(f"{{x}}: {}")\n'),
    "a log": ("lamina/a.py", 'log.warning(\n    "{}", x\n)\n'),
    "a comment in C++": ("csrc/a.cpp", "int x;  // {}\n"),
    "a block comment in C++": ("csrc/a.h", "/* {} */\n"),
    "an error in C++": ("csrc/a.cu", 'throw Error("{}");\n'),
}
FAULTS = {"more than 30 words": LONG, "more than one semicolon": SEMICOLONS, "the word behind": WORD}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_is_found_wherever_people_read_it(where: str, rule: str) -> None:
    path, file = WHERE[where]
    (fault,) = prose.lint(path, file.format(FAULTS[rule]))
    assert fault.rule == rule
    assert fault.line == file[: file.index("{}")].count("\n") + 1
    assert fault.path == path
    assert list(prose.lint(path, file.format("Some plain text."))) == []


@pytest.mark.parametrize(
    "word", ["beside", "told", "said", "whoever", "Somebody", "nobody", "made good", "come to rest"]
)
def test_each_banned_word_is_found(word: str) -> None:
    assert [f.rule for f in prose.lint("docs/a.md", f"Text: {word} here.\n")] == [f"the word {word.lower()}"]
    assert list(prose.lint("docs/a.md", f"Text `{word}` and test_{word}_here, {word}x.\n")) == []


CLEAN = {
    "two sentences": f"{LONG.replace('many ', '', 1)} {LONG.replace('many ', '', 1)}",
    "an abbreviation": "It is short, e.g. this one; or that, i.e. this; it ends.".replace("; it", ", it"),
    "a span": "It has `" + "many " * 40 + "; ; ; told`, and ``a ` b; c; d``.",
    "a link": "See [a page](https://example.org/behind/told;a;b;c) and https://example.org/beside.",
    "code": "Run it:\n\n    behind; beside; told\n\n```\nbehind; beside; told\n```\nDone.",
    "items": "- One; two\n- Three; four\n1. Five; six",
    "a table": "| one; two | three; four |\n|---|---|\n| `a | b; c; d` | " + "many " * 20 + "|",
}


@pytest.mark.parametrize("kind", CLEAN)
def test_plain_text_has_no_fault(kind: str) -> None:
    assert list(prose.lint("docs/a.md", CLEAN[kind])) == []
    assert list(prose.lint("tests/a.py", f'"""{CLEAN[kind]}"""')) == []


def test_strings_of_tests_are_data() -> None:
    assert list(prose.lint("tests/a.py", f'x = "{WORD}"\n')) == []


def test_statements_are_no_prose() -> None:
    assert list(prose.lint("lamina/a.py", 'x = "CREATE TABLE a (b INT); CREATE TABLE b (c INT);"\n')) == []


@given(st.lists(st.sampled_from(["word", "`a b`", "3.5", "(two)", "x.y"]), min_size=1, max_size=60), st.integers(1, 9))
def test_a_sentence_is_long_from_31_words_on(words: list[str], width: int) -> None:
    lines = [" ".join(words[n : n + width]) for n in range(0, len(words), width)]
    for path, text in [
        ("docs/a.md", "\n".join(lines) + "."),
        ("a/b.py", "".join(f"# {line}\n" for line in lines)),
        ("a/b.py", '"""' + "\n".join(lines) + '"""'),
    ]:
        assert [f.rule for f in prose.lint(path, text)] == ["more than 30 words"] * (len(words) > 30)


@pytest.mark.parametrize("word", sorted(docstrings.FIRST))
@pytest.mark.parametrize(
    "form", ['"""{} x."""', "class A:\n    '''a'''\n    def f(self) -> None:\n        \"\"\"{} x.\"\"\""]
)
def test_a_docstring_that_begins_badly_is_found(word: str, form: str) -> None:
    (fault,) = docstrings.lint("lamina/a.py", form.format(word))
    assert fault.rule == f"docstring begins with {word}"
    for fine in (f"The {word}", f"{word}x", f"`{word}`"):
        assert list(docstrings.lint("lamina/a.py", form.format(fine))) == []
    assert list(docstrings.lint("lamina/a.py", f'x = 1\ny = """{word} x."""')) == []


SOURCES = [path for top in ("netstack", "tests/lints", "lamina/protocol") for path in (faults.ROOT / top).rglob("*.py")]


@pytest.mark.long
def test_docstrings_and_comments_are_those_that_python_sees() -> None:
    """The oracles are ast and tokenize."""
    for path in SOURCES:
        code = path.read_text()
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        known = [ast.get_docstring(node) for node in ast.walk(ast.parse(code)) if isinstance(node, nodes)]
        seen = [inspect.cleandoc(piece.text) for piece in pieces(".py", code) if piece.kind == "docstring"]
        assert sorted(seen) == sorted(filter(None, known)), path
        words = [
            word
            for token in tokenize.generate_tokens(io.StringIO(code).readline)
            if token.type == tokenize.COMMENT
            for word in token.string.lstrip("#!").split()
        ]
        seen = [word for piece in pieces(".py", code) if piece.kind == "comment" for word in piece.text.split()]
        assert seen == words, path


@pytest.mark.parametrize(("text", "status"), [("Plain.", 0), (WORD, 1)])
def test_a_fault_in_any_file_of_the_repository_fails(text: str, status: int, tmp_path: Path) -> None:
    lints = Path(__file__).parent
    shutil.copytree(lints, tmp_path / "tests" / "lints", ignore=shutil.ignore_patterns("test*", "__pycache__"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"# Title\n\n{text}\n")
    program = [sys.executable, "tests/lints/prose.py"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout == (f"docs/a.md:3: the word behind: {text}\n" if status else "")
