"""Libraries and command-line programs that speak OpenAI's API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from running import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000), pytest.mark.usefixtures("client")]
Run, Environment = Callable[..., str], Callable[..., Path]
QUESTION = "Write a class."

LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI, OpenAI
url, question = sys.argv[1:]
chat = ChatOpenAI(model="tiny", base_url=url, api_key="none", temperature=0, max_tokens=12, stream_usage=True)
whole = chat.invoke(question)
parts = list(chat.stream([("system", "be brief"), ("human", question)]))
usage = next(p.usage_metadata for p in parts if p.usage_metadata)
batch = chat.batch([question, question])
plain = OpenAI(model="tiny", base_url=url, api_key="none", temperature=0, max_tokens=5).invoke("def f(")
print(json.dumps({"text": whole.content, "streamed": usage["output_tokens"], "parts": len(parts),
                  "batch": [b.content for b in batch], "plain": plain}))
"""

LITELLM = """
import json, sys, asyncio, litellm
url, question = sys.argv[1:]
ask = dict(messages=[{"role": "user", "content": question}], api_base=url, api_key="none", temperature=0, max_tokens=12)
texts, parts = [], 0
for name in ("hosted_vllm/tiny", "openai/tiny"):
    whole = litellm.completion(model=name, **ask)
    texts.append(whole.choices[0].message.content)
    streamed = [c.choices[0].delta.content or "" for c in litellm.completion(model=name, stream=True, **ask)]
    texts.append("".join(streamed))
many = asyncio.run(litellm.acompletion(model="openai/tiny", **ask))
texts.append(many.choices[0].message.content)
refused = ""
try:
    litellm.completion(model="openai/tiny", **{**ask, "temperature": 5.0})
except litellm.BadRequestError as e:
    refused = str(e)
too_long = [{"role": "user", "content": "class " * 20000}]
overflows = []
for name in ("hosted_vllm/tiny", "openai/tiny"):
    for fields in ({"messages": too_long}, {"max_tokens": 1000000}):
        try:
            litellm.completion(model=name, **{**ask, **fields})
        except litellm.ContextWindowExceededError:
            overflows.append(name)
small = {"model": "openai/tiny", "api_base": url, "api_key": "none", "max_tokens": 12}
large = {"model": "openai/large", "api_key": "none", "mock_response": "a larger model"}
models = [{"model_name": "small", "litellm_params": small}, {"model_name": "large", "litellm_params": large}]
router = litellm.Router(model_list=models, context_window_fallbacks=[{"small": ["large"]}], num_retries=0)
fallback = router.completion(model="small", messages=too_long).choices[0].message.content
print(json.dumps({"texts": texts, "usage": whole.usage.completion_tokens, "refused": refused,
                  "overflows": overflows, "fallback": fallback}))
"""

OVERFLOW = """
import json, sys, litellm
short, long, prompt = sys.argv[1:]
ask = dict(messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=12)
try:
    litellm.completion(model="openai/tiny", api_base=short, api_key="none", **ask)
    refused = ""
except litellm.ContextWindowExceededError as e:
    refused = str(e)
names = {"short": short, "long": long}
router = litellm.Router(
    model_list=[{"model_name": n, "litellm_params": {"model": "openai/tiny", "api_base": u, "api_key": "none"}}
                for n, u in names.items()],
    context_window_fallbacks=[{"short": ["long"]}], num_retries=0)
answer = router.completion(model="short", **ask)
print(json.dumps({"refused": refused, "text": answer.choices[0].message.content,
                  "prompt_tokens": answer.usage.prompt_tokens}))
"""

OPENAI = """
import json, sys
from openai import OpenAI
url, question = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none", max_retries=0)
ask = dict(model="tiny", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=12)
whole = client.chat.completions.create(**ask)
chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
scored = client.completions.create(model="tiny", prompt="def f(", max_tokens=0, echo=True, logprobs=2)
print(json.dumps({"models": [m.id for m in client.models.list()], "text": whole.choices[0].message.content,
                  "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
                  "usage": chunks[-1].usage.completion_tokens, "scores": scored.choices[0].logprobs.token_logprobs}))
"""


@pytest.fixture
def text(server: Running) -> str:
    """Returns the text that all of them should get."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.client("openai-python")
def test_openai_python(server: Running, text: str, environment: Environment, run: Run) -> None:
    python = environment("openai-python", "openai") / "python"
    found = json.loads(run(python, "-c", OPENAI, f"{server.url}/v1", QUESTION))
    assert found["text"] == found["streamed"] == text
    assert found["models"] == ["tiny"]
    assert found["scores"][0] is None
    assert all(s < 0 for s in found["scores"][1:])


@pytest.mark.client("openai-node")
def test_openai_node(server: Running, text: str, tmp_path: Path, run: Run) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    run("npm", "install", "--silent", "--no-audit", "--no-fund", "openai")
    (tmp_path / "ask.mjs").write_text(
        "import OpenAI from 'openai';\n"
        "const [url, question] = process.argv.slice(2);\n"
        "const client = new OpenAI({baseURL: url, apiKey: 'none', maxRetries: 0});\n"
        "const ask = {model: 'tiny', messages: [{role: 'user', content: question}], temperature: 0, max_tokens: 12};\n"
        "const whole = await client.chat.completions.create(ask);\n"
        "let streamed = '';\n"
        "for await (const chunk of await client.chat.completions.create({...ask, stream: true}))\n"
        "  streamed += chunk.choices[0]?.delta?.content ?? '';\n"
        "console.log(JSON.stringify([whole.choices[0].message.content, streamed]));\n"
    )
    assert json.loads(run("node", "ask.mjs", f"{server.url}/v1", QUESTION)) == [text, text]


@pytest.mark.client("langchain-openai")
def test_langchain_openai(server: Running, text: str, environment: Environment, run: Run) -> None:
    python = environment("langchain-openai", "langchain-openai") / "python"
    found = json.loads(run(python, "-c", LANGCHAIN, f"{server.url}/v1", QUESTION))
    assert found["text"] == text
    assert found["batch"] == [text, text]
    assert 0 < found["streamed"] <= 12
    assert found["parts"] > 2
    assert found["plain"]


@pytest.mark.client("litellm")
def test_litellm(server: Running, text: str, environment: Environment, run: Run) -> None:
    python = environment("litellm", "litellm") / "python"
    flags = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    found = json.loads(run(python, "-c", LITELLM, f"{server.url}/v1", QUESTION, **flags).splitlines()[-1])
    assert found["texts"] == [text] * 5
    assert "temperature" in found["refused"]
    assert found["overflows"] == ["hosted_vllm/tiny"] * 2 + ["openai/tiny"] * 2
    assert found["fallback"] == "a larger model", "its own check of the context has fired"


@pytest.mark.client("litellm")
def test_litellm_goes_on_where_a_prompt_fits(
    server: Running, environment: Environment, run: Run, tmp_path: Path
) -> None:
    """Its own check of the words of a refusal: a prompt too long for one server is asked of the next."""
    python = environment("litellm", "litellm") / "python"
    flags = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    length = 64
    short = Running(tmp_path / "short", "--dtype=float32", "--served-model-name=tiny", f"--max-model-len={length}")
    try:
        urls = (f"{short.url}/v1", f"{server.url}/v1")
        found = json.loads(run(python, "-c", OVERFLOW, *urls, QUESTION * 40, **flags).splitlines()[-1])
    finally:
        short.kill()
    assert f"maximum context length is {length} tokens" in found["refused"]
    assert found["prompt_tokens"] > length
    assert found["text"]


@pytest.mark.client("llm")
def test_llm(server: Running, text: str, environment: Environment, run: Run, tmp_path: Path) -> None:
    program = environment("llm", "llm") / "llm"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: lamina\n  model_name: tiny\n  api_base: {server.url}/v1\n  api_key_name: none\n"
    )
    options = ("-o", "temperature", "0", "-o", "max_tokens", "12", "--key", "none")
    for mode in ((), ("--no-stream",)):
        out = run(program, "-m", "lamina", *options, *mode, QUESTION, LLM_USER_PATH=str(tmp_path))
        assert out.strip() == text.strip()
