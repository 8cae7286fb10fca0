"""The code that one warm ``LLM.generate`` crosses stays short enough to be read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lamina.netstack.own_python import own_python

SCRIPT = Path(__file__).parents[1] / "perf" / "trace_generate.py"
MOST_FILES, MOST_FUNCTIONS = 60, 450


@pytest.mark.long
def test_one_warm_generate_crosses_few_files_and_functions() -> None:
    command, environ = own_python(str(SCRIPT))
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300).stdout
    total = json.loads(printed.splitlines()[-1])
    assert total["what"] == "one warm generate"
    assert total["files"] <= MOST_FILES
    assert total["functions"] <= MOST_FUNCTIONS
