"""Small models on disk, made once per test session, and the reference that every run is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from families import FAMILIES, MAX_LEN, Case, Family
from tiny import llama
from worker_processes import WARM, workers_of


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def gemma2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows shorter than a chunk, a soft cap."""
    path = tmp_path_factory.mktemp("gemma2")
    next(f for f in FAMILIES if f.name == "gemma2").build().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_lm() -> Path:
    path = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"
    if not (path / "config.json").exists():
        pytest.skip("examples/tiny_lm/model is not there: run python examples/tiny_lm/train.py")
    return path


@pytest.fixture(scope="session")
def reference(llama_path: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of transformers for a prompt of ids. Many tests ask for the same, which is computed once."""
    model, known = llama(), dict[tuple[int, ...], list[int]]()

    def generate(prompt: list[int], count: int) -> list[int]:
        if len(known.get(tuple(prompt), [])) < count:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
            known[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return known[tuple(prompt)][:count]  # greedy tokens do not depend on how many follow

    return generate


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """Returns the cases that were made, by the name of their family."""
    return {}


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where ``case`` keeps its captures, which no other test has captured."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest, cases: dict[str, Case], captures: Path) -> Case:
    """A family of ``families.each_family``."""
    from lamina.models.convert import convert_model

    family: Family = request.param
    if family.name not in cases:
        model = family.build()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LAMINA_CACHE", str(captures))
            cases[family.name] = family, model, convert_model(model, max_model_len=MAX_LEN, keep=True)
    return cases[family.name]


@pytest.fixture
def prompts() -> list[list[int]]:
    """Ragged prompts of token ids; the longest takes several prefill chunks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 320, (n,), generator=generator).tolist() for n in (3, 17, 1, 90, 33)]


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """The test ends with no worker of its own running."""
    before = {pid for pid, _ in workers_of(os.getpid())}
    yield
    left = [pid for pid, command in workers_of(os.getpid()) if not command.startswith(WARM) and pid not in before]
    assert not left, f"worker processes left: {left}"
