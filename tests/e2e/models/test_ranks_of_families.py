"""Every family that can be cut into parts: the ranks together compute what the whole does, each with its share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, Family
from torch import Tensor

from lamina.converter import SlicedProgram
from lamina.converter.rows import stand_in_attention
from lamina.models.convert import convert_model
from lamina.models.errors import ModelError
from lamina.models.load import LoadedModel, load
from lamina.ops import collective

NAMES = (
    "llama-gqa", "mixtral", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "qwen3-moe",
)  # fmt: skip
CUT = [
    pytest.param(f, marks=() if f.name in NAMES[:2] else pytest.mark.slow, id=f.name)
    for f in FAMILIES
    if f.name in NAMES
]
MAX_LEN = 64
ROWS = 6
LAYERS = {"num_hidden_layers": 2}  # do here as well as all


class Meeting:
    """Ranks as threads that lay down what they have and look at what lies there."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.places: list[Any] = [None] * size


class Rank:
    """One end of a meeting; see lamina.ops.collective.Collective."""

    wait_s = 0.0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.places)

    def _all(self, x: Tensor) -> list[Tensor]:
        self._meeting.places[self.rank] = x
        self._meeting.barrier.wait()
        found = list(self._meeting.places)
        self._meeting.barrier.wait()
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        assert size == self.size
        return torch.cat(self._all(x), -1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._all(x)[0]


class Messages:
    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def q(self, call: int, q: Tensor) -> None:
        self.sent = [q]

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.sent += [k, v]


def run(program: SlicedProgram) -> Tensor:
    """Logits of a few tokens from all over the vocabulary, with something cheap for attention."""
    ids = torch.arange(ROWS)[:, None] * (VOCAB // ROWS) + 5
    carry: Sequence[Tensor] = (ids, torch.arange(ROWS)[:, None])
    for piece in program.slices[:-1]:
        messages = Messages()
        carry = (*piece(*carry, messages), stand_in_attention(*messages.sent))
    (logits,) = program.slices[-1](*carry)
    return logits[:, -1]


def on_threads(size: int, work: Callable[[int], Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: work(r)})) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return [found[r] for r in range(size)]


def cut(loaded: LoadedModel) -> SlicedProgram:
    return convert_model(loaded.model, max_model_len=MAX_LEN, part=loaded.part)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", CUT)
def test_ranks_compute_what_the_whole_does_with_a_share_of_the_bytes(family: Family, tmp_path: Path) -> None:
    replace(family, options={**family.options, **LAYERS}).build().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    stored = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    whole = cut(loaded)
    wanted = run(whole)
    for size in (2, 4):
        parts = [load(tmp_path, rank=r, size=size) for r in range(size)]
        for part in parts:
            own = sum(p.numel() * p.element_size() for p in part.model.parameters())
            assert stored / size <= own <= 1.1 * stored / size, "resident bytes of a rank"
            assert all(p.is_contiguous() for p in part.model.parameters()), "no page of another rank's is touched"
        programs = [cut(part) for part in parts]
        for rank, program in enumerate(programs):
            assert program.weight_bytes <= 1.1 * whole.weight_bytes / size
            calls = zip(program.calls, whole.calls, strict=True)
            assert all(c.q.shape[0] * size == w.q.shape[0] and c.kv_bytes * size == w.kv_bytes for c, w in calls), rank
        meeting = Meeting(size)
        bound = [collective.bind(p, Rank(meeting, r)) for r, p in enumerate(programs)]
        found = torch.cat(on_threads(size, lambda r, bound=bound: run(bound[r])), -1)
        assert float((found - wanted).abs().max()) < 2e-4 * float(wanted.abs().max())


@pytest.mark.long
def test_without_the_other_ranks_the_result_is_another(tmp_path: Path) -> None:
    """The control: what is compared above depends on the sums."""
    family = next(f for f in FAMILIES if f.name == "llama-gqa")
    replace(family, options={**family.options, **LAYERS}).build().save_pretrained(tmp_path)
    wanted = run(cut(load(tmp_path)))
    alone = run(cut(load(tmp_path, rank=0, size=2)))
    assert float((alone - wanted[:, : VOCAB // 2]).abs().max()) > 0.1 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("llama-gqa", 3, r"--tensor-parallel-size 3 does not divide the 4 KV heads .*: use 1 or 2 or 4$"),
        ("llama-gqa", 8, r"--tensor-parallel-size 8 does not divide the 4 KV heads .*: use 1 or 2 or 4$"),
        ("gpt2", 2, r"--tensor-parallel-size: GPT2LMHeadModel has no plan .*: leave it at 1$"),
        ("bloom", 2, r"--tensor-parallel-size: BloomForCausalLM has no plan .*: leave it at 1$"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_can(name: str, size: int, words: str, tmp_path: Path) -> None:
    next(f for f in FAMILIES if f.name == name).build().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        load(tmp_path, rank=0, size=size)


def test_a_vocabulary_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    from tiny import llama

    llama(vocab_size=322).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"4 does not divide the 322 of model.embed_tokens.weight: use 1 or 2$"):
        load(tmp_path, rank=0, size=4)


def test_a_module_is_not_cut() -> None:
    from tiny import llama

    with pytest.raises(ModelError, match="--tensor-parallel-size 2 or more does not go with a torch.nn.Module"):
        load(llama(), rank=0, size=2)
