"""Small models on disk, made once per test session, and the reference that every run is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def sharpen(model: Any) -> Any:
    """Make attention matter: with default weights a random model hardly looks back, and a broken store would pass."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(k in name for k in ("q_proj", "k_proj", "c_attn", "query_key_value")):
                weight.mul_(4.0)
            elif "embed" in name or "wte" in name or "lm_head" in name:
                weight.mul_(5.0)
    return model.eval()


def llama(**options: Any) -> Any:
    """A Llama of two layers with 4 KV heads, in fp32, the same on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(11)
    return sharpen(LlamaForCausalLM(LlamaConfig(**{**shape, **options})))


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_lm() -> Path:
    path = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"
    if not (path / "config.json").exists():
        pytest.skip("examples/tiny_lm/model is not there: run python examples/tiny_lm/train.py")
    return path


@pytest.fixture(scope="session")
def reference(llama_path: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of transformers for a prompt of ids."""
    model = llama()

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture
def prompts() -> list[list[int]]:
    """Ragged prompts of token ids; the longest takes several prefill chunks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 320, (n,), generator=generator).tolist() for n in (3, 17, 1, 90, 33)]


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """The test ends with no worker of its own running."""
    yield
    mine = str(os.getpid())
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if stat[1] == mine and stat[0] != "Z" and b"lamina.workers" in command:
                left.append(entry.name)
    assert not left, f"worker processes left: {left}"
