"""Environment variables are listed in one place, and the cluster's key is what its variables say.

``python tests/utils/test_env.py`` writes docs/environment.md from ``lamina/env.py``.

Covers: netstack/contract/cluster_key.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lamina.env import VARIABLES, cluster_key
from lamina.netstack.contract.cluster_key import KEY, KEY_FILE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "environment.md"  # which this file writes, if it is run
HEAD = """# Environment variables

Look up the environment variables that Lamina reads. A flag overrides the variable of the same
meaning. `python tests/utils/test_env.py` writes this page from `lamina/env.py`.

"""
GOOD = "0123456789abcdef" * 4


def variables_read() -> set[str]:
    """Names in Python sources, and those that C++ reads."""
    found = set[str]()
    for package in ("lamina", "converter", "netstack"):
        for path in (ROOT / package).rglob("*.py"):
            if path != ROOT / "lamina" / "env.py":
                found |= set(re.findall(r"(?<!-D)LAMINA_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    for path in (ROOT / "csrc").rglob("*.*"):
        found |= set(re.findall(r'getenv\("(LAMINA_\w+)"\)', path.read_text()))
    return found


def test_every_variable_in_the_sources_is_listed_and_nothing_else() -> None:
    assert variables_read() == set(VARIABLES)


def page() -> str:
    """Return the text of the page. Variables that Lamina sets for its own processes come last."""
    rows = {name: f"| `{name}` | {text} |" for name, text in VARIABLES.items()}
    own = {name for name, text in VARIABLES.items() if text.startswith("set by ")}
    parts = [[row for name, row in rows.items() if (name in own) == wanted] for wanted in (False, True)]
    tables = ["\n".join(["| variable | meaning |", "|---|---|", *part]) for part in parts]
    return HEAD + tables[0] + "\n\n## Set by Lamina for its own processes\n\n" + tables[1] + "\n"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run: python tests/utils/test_env.py"


def test_without_a_variable_every_run_has_a_key_of_its_own() -> None:
    assert len({cluster_key({}) for _ in range(3)}) == 3
    assert len(cluster_key({})) == 32


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_key_of_the_environment_and_of_a_file(tmp_path: Path) -> None:
    assert cluster_key({KEY: GOOD}) == bytes.fromhex(GOOD)
    assert cluster_key({KEY_FILE: str(key_file(tmp_path, f"{GOOD}\n"))}) == bytes.fromhex(GOOD)
    assert len(cluster_key({KEY: "", KEY_FILE: ""})) == 32


@pytest.mark.parametrize("text", ["ab" * 15, "not hexadecimal, not at all, no", "ab" * 16 + "g", " "])
def test_an_unusable_key_is_refused_without_being_quoted(tmp_path: Path, text: str) -> None:
    for environ in ({KEY: text}, {KEY_FILE: str(key_file(tmp_path, text))}):
        with pytest.raises(ValueError, match="hexadecimal") as error:
            cluster_key(environ)
        assert text.strip() == "" or text not in str(error.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match="chmod 600") as error:
        cluster_key({KEY_FILE: str(key_file(tmp_path, GOOD, mode))})
    assert GOOD not in str(error.value)


def test_both_at_once_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unset one"):
        cluster_key({KEY: GOOD, KEY_FILE: "x"})
    with pytest.raises(ValueError, match="cannot be read"):
        cluster_key({KEY_FILE: str(tmp_path / "nowhere")})


if __name__ == "__main__":
    PAGE.write_text(page())
