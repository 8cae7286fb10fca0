"""The features that agents need, by real libraries: answers by a schema, tools, reasoning.

``plain`` is the shipped model, which follows no schema by itself: a grammar makes what comes back. ``scripted`` is a
made model whose calls, JSON and reasoning are known, as a large model writes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_programs as programs
import httpx
import pytest
from running import Running
from scripted import write_scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000), pytest.mark.usefixtures("client")]
Run, Environment = Callable[..., str], Callable[..., Path]
CALL = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
PARIS, OSLO = {"city": "Paris", "days": 3}, {"city": "Oslo", "days": 1}
AFTER = "It rains in Paris for 3 days."
SCRIPTS = {
    "call": f"I look.\n{CALL % json.dumps(PARIS)}",
    "two": f"{CALL % json.dumps(PARIS)}\n{CALL % json.dumps(OSLO)}",
    "json": json.dumps(PARIS),
    "think": "<think>\nShort days.\n</think>\n\nIt rains.",
    "after": AFTER,
    "edit": "hello.py\n```\nprint('after')\n```\n",
}
BOTH = [PARIS, OSLO]


@pytest.fixture(scope="module")
def urls(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted(folder / "model", SCRIPTS)
    flags = ("--served-model-name=tiny", "--reasoning-parser=qwen3", "--max-model-len=8192")
    running = Running(folder / "log", *flags, model=str(folder / "model"))
    yield f"{server.url}/v1", f"{running.url}/v1"
    running.kill()


def check_weather(value: Any) -> None:
    """Passes for what the schema allows."""
    assert set(value) == {"city", "days"}, value
    assert value["city"] in ("Paris", "Oslo"), value
    assert type(value["days"]) is int, value
    assert value["days"] in range(10), value


def check(found: dict[str, Any], known: dict[str, Any]) -> None:
    """``known``: what the scripts say; all else has the schema."""
    for name, value in known.items():
        assert found.pop(name) == value, name
    assert found
    for value in found.values():
        check_weather(value)


@pytest.mark.client("openai-python")
def test_the_shipped_model_follows_no_schema_by_itself(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "@x the weather?"}], "max_tokens": 100}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    with pytest.raises(ValueError):
        json.loads(answer["choices"][0]["message"]["content"])


@pytest.mark.client("openai-python")
@pytest.mark.parametrize("version", ["openai", "openai<3"])
def test_openai_python(urls: tuple[str, str], environment: Environment, run: Run, version: str) -> None:
    python = environment("openai-python" + "-2" * ("<" in version), version, "pydantic") / "python"
    found = json.loads(run(python, "-c", programs.OPENAI, *urls))
    events = found.pop("events")
    assert {"chunk", "content.delta", "content.done"} <= {*events}
    known = {
        "reason": "tool_calls",
        "calls": BOTH,
        "said": "I look.",
        "streamed call": PARIS,
        "after": AFTER,
        "reasoning": ["Short days.", "It rains.", True],
        "call in place of the format": BOTH,
        "format in place of a call": PARIS,
    }
    check(found, known)


@pytest.mark.client("litellm")
def test_litellm(urls: tuple[str, str], environment: Environment, run: Run) -> None:
    python = environment("litellm", "litellm") / "python"
    out = run(python, "-c", programs.LITELLM, *urls, LITELLM_LOCAL_MODEL_COST_MAP="True")
    known = dict[str, Any]()
    for name in ("hosted_vllm/tiny", "openai/tiny"):
        known |= {f"{name} auto": BOTH, f"{name} streamed": BOTH, f"{name} reasoning": ["Short days.", "It rains."]}
    check(json.loads(out.splitlines()[-1]), known)


@pytest.mark.client("langchain-openai")
def test_langchain_openai(urls: tuple[str, str], environment: Environment, run: Run) -> None:
    python = environment("langchain-openai", "langchain-openai") / "python"
    found = json.loads(run(python, "-c", programs.LANGCHAIN, *urls))
    check(found, {"json_mode": PARIS, "calls": BOTH, "after": AFTER, "streamed": BOTH})


@pytest.mark.client("llama-index")
def test_llama_index(urls: tuple[str, str], environment: Environment, run: Run) -> None:
    python = environment("llama-index", "llama-index-llms-openai-like") / "python"
    found = json.loads(run(python, "-c", programs.LLAMA_INDEX, *urls).splitlines()[-1])
    check(found, {"calls": BOTH, "called": "rain in Paris for 3", "streamed": BOTH})


@pytest.mark.client("instructor")
def test_instructor(urls: tuple[str, str], environment: Environment, run: Run) -> None:
    python = environment("instructor", "instructor") / "python"
    found = json.loads(run(python, "-c", programs.INSTRUCTOR, *urls))
    check(found, {"JSON": PARIS, "MD_JSON": PARIS})


@pytest.mark.client("pydantic-ai")
def test_pydantic_ai(urls: tuple[str, str], environment: Environment, run: Run) -> None:
    python = environment("pydantic-ai", "pydantic-ai-slim[openai]") / "python"
    found = json.loads(run(python, "-c", programs.PYDANTIC_AI, *urls))
    check(found, {"prompted": PARIS, "after": AFTER, "calls": [OSLO, PARIS], "streamed": AFTER})


@pytest.mark.client("aider")
def test_aider_edits_a_file(urls: tuple[str, str], environment: Environment, run: Run, tmp_path: Path) -> None:
    program = environment("aider", "aider-chat") / "aider"
    (tmp_path / "hello.py").write_text("print('before')\n")
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics",
             "--no-show-release-notes", "--map-tokens=0")  # fmt: skip
    out = run(
        program, *quiet, "--model=openai/tiny", f"--openai-api-base={urls[1]}", "--openai-api-key=none",
        "--edit-format=whole", "--message=@edit this file", "hello.py", LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    assert (tmp_path / "hello.py").read_text() == "print('after')\n", out


def run_in_node(program: str, urls: tuple[str, str], folder: Path, run: Run, *packages: str) -> dict[str, Any]:
    """Returns what a program prints last; it runs with ``packages``."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    run("npm", "install", "--silent", "--no-audit", "--no-fund", *packages)
    (folder / "ask.mjs").write_text(program)
    found: dict[str, Any] = json.loads(run("node", "ask.mjs", *urls).splitlines()[-1])
    return found


@pytest.mark.client("openai-node")
def test_openai_node(urls: tuple[str, str], tmp_path: Path, run: Run) -> None:
    found = run_in_node(programs.NODE_OPENAI, urls, tmp_path, run, "openai", "zod")
    check(found, {"after": AFTER, "calls": BOTH, "streamedCalls": BOTH})


@pytest.mark.client("ai-sdk")
def test_ai_sdk(urls: tuple[str, str], tmp_path: Path, run: Run) -> None:
    found = run_in_node(programs.NODE_AI, urls, tmp_path, run, "ai@6", "@ai-sdk/openai-compatible@2", "zod")
    known = {"jsonMode": PARIS, "after": AFTER, "calls": BOTH, "streamed": AFTER, "streamedCalls": BOTH}
    check(found, {**known, "reasoning": "Short days."})
