"""Every family decodes as transformers does, whatever the batch does; and a wrong attention is noticed.

Logits are checked through a ``Runner`` that runs the slices in this process, on an attention and a KV store of its own:
plain, in fp64, and easy to break. Tokens are checked through memory workers in processes of their own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import pytest
import torch
from families import FAMILIES, FIRST_TOKEN, MAX_LEN, VOCAB, Case, Family, each_family
from torch import Tensor

import lamina.tools.check.agreement
from lamina import LLM, SamplingParams
from lamina.converter import SlicedProgram
from lamina.models.convert import layer_shapes
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.step_plan import LayerShape

PROMPTS = (19, 1, 7, 30)  # tokens; some shorter, some longer than the windows
NEW_TOKENS = 64
SHORT = 16  # new tokens where something is wrong on purpose
LEAST_DISTINCT = 16
LEAST_MARGIN = 100.0  # median distance of the two best logits, in units of the logit error
TOLERANCE = 1e-4  # largest logit error, relative to the spread of the logits
RED = 100.0  # a control must err by that many tolerances


@dataclass(frozen=True)
class Row:
    """One token of one sequence. Rows of one sequence come in the order of their positions."""

    sequence: int
    position: int
    token: int


class Runner(Protocol):
    """A model that decodes with its KV cache elsewhere."""

    def step(self, rows: Sequence[Row]) -> Tensor:
        """Store the K, V of the rows and return their logits [rows, vocabulary]."""
        ...


class Memory:
    """A memory side for the slices: K, V of a layer's sequence by position, attention one query at a time, in fp64."""

    def __init__(self, layers: list[LayerShape]) -> None:
        self.layers = layers
        self.zeroed_heads = 0  # of each layer's KV heads, the first so many are lost
        self.rows: Sequence[Row] = ()
        self._specs = [AttentionSpec.decode(shape.spec) for shape in layers]
        # By (layer, sequence): K, V [query heads, MAX_LEN, dim], of which the first positions are filled.
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._q: dict[int, Tensor] = {}

    def q(self, layer: int, q: Tensor) -> None:
        self._q[layer] = q.double()

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        group = self.layers[layer].q_heads // self.layers[layer].kv_heads
        k, v = (x[:, :, 0].double().clone() for x in (k, v))
        for x in (k, v):
            x[:, : self.zeroed_heads] = 0.0
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        for i, row in enumerate(self.rows):
            if (layer, row.sequence) not in self._stored:
                self._stored[layer, row.sequence] = tuple(x.new_zeros(x.shape[1], MAX_LEN, x.shape[2]) for x in (k, v))
            for stored, x in zip(self._stored[layer, row.sequence], (k, v), strict=True):
                stored[:, row.position] = x[i]

    def o(self, layer: int, dtype: torch.dtype) -> Tensor:
        q = self._q.pop(layer)
        return torch.stack([self._attend(layer, row, q[i, :, 0]) for i, row in enumerate(self.rows)])[:, None].to(dtype)

    def _attend(self, layer: int, row: Row, q: Tensor) -> Tensor:
        shape, spec = self.layers[layer], self._specs[layer]
        first, stop = max(0, row.position + 1 - spec.window) if spec.window else 0, row.position + 1
        k, v = (x[:, first:stop] for x in self._stored[layer, row.sequence])
        score = (k @ q[:, :, None])[:, :, 0] * spec.scale
        if spec.softcap:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        if spec.alibi:
            score += operand(shape.slopes)[:, None] * (torch.arange(first, stop) - row.position)
        if spec.sinks:
            score = torch.cat([score, operand(shape.sinks)[:, None]], 1)
        return (score.softmax(1)[:, None, : v.shape[1]] @ v)[:, 0]


def operand(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).double()


class LocalRunner:
    """Runs the slices here, against a Memory."""

    def __init__(self, program: SlicedProgram, memory: Memory) -> None:
        self.program, self.memory = program, memory

    def step(self, rows: Sequence[Row]) -> Tensor:
        self.memory.rows = rows
        first, *others = self.program.slices
        carry = first(torch.tensor([[r.token] for r in rows]), torch.tensor([[r.position] for r in rows]), self.memory)
        for layer, slice_ in enumerate(others):
            send = () if slice_ is others[-1] else (self.memory,)
            carry = slice_(*carry, self.memory.o(layer, self.program.calls[layer].out.dtype), *send)
        return carry[0][:, -1]


@dataclass
class Text:
    """A sequence and the logits that it got, position by position."""

    id: int
    tokens: list[int]
    num_prompt: int
    num_new: int
    logits: list[Tensor] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.num_new - (len(self.tokens) - self.num_prompt)


def ragged_texts(num_new: int) -> list[Text]:
    draw = random.Random(7)
    prompts = [[draw.randrange(FIRST_TOKEN, VOCAB) for _ in range(n)] for n in PROMPTS]
    return [Text(i, p, len(p), num_new) for i, p in enumerate(prompts)]


def decode(runner: Runner, num_new: int = NEW_TOKENS) -> list[Text]:
    """Greedy decoding of ragged prompts, in batches that grow, shrink and change their order.

    Prompts come in pieces of random length, next to the single rows of others; two texts swap rows in the middle.
    """
    draw = random.Random(7)
    texts = ragged_texts(num_new)
    running: list[Text] = []
    waiting = list(texts)
    for step in range(10_000):
        if waiting and step % (num_new // 8) == 0:
            running.insert(draw.randrange(len(running) + 1), waiting.pop(0))
        if step == num_new // 2:
            running[0], running[-1] = running[-1], running[0]
        advance(runner, running, draw)
        running = [t for t in running if t.missing > 0]
        if not running and not waiting:
            return texts
    raise AssertionError("decoding does not end")


def advance(runner: Runner, running: list[Text], draw: random.Random) -> None:
    parts = []
    for text in running:
        done = len(text.logits)
        count = min(len(text.tokens) - done, draw.randint(1, 11))
        parts.append([Row(text.id, p, text.tokens[p]) for p in range(done, done + count)])
    logits = runner.step([row for part in parts for row in part]).split([len(p) for p in parts])
    for text, rows in zip(running, logits, strict=True):
        text.logits += list(rows.float())
        if len(text.logits) == len(text.tokens):
            text.tokens.append(int(rows[-1].argmax()))


@dataclass(frozen=True)
class Outcome:
    """``error``: largest difference of a logit, over the spread of the logits; ``margin``: median, same unit."""

    error: float
    margin: float
    distinct: int  # least number of different new tokens in a text
    wrong: int  # tokens other than the reference's, where its margin is ten times the error


def compare(model: Any, texts: list[Text]) -> Outcome:
    """Against transformers, which reads each text as a whole."""
    errors, margins, wrong = [], [], 0
    for text in texts:
        with torch.no_grad():
            reference = model(torch.tensor([text.tokens[: len(text.logits)]])).logits[0].float()
        spread = reference.std()
        error = (torch.stack(text.logits) - reference).abs().max() / spread
        drawn = reference[text.num_prompt - 1 :]
        best = drawn.topk(2).values
        margin = (best[:, 0] - best[:, 1]) / spread
        differs = drawn.argmax(1) != torch.tensor(text.tokens[text.num_prompt :])
        wrong += int((differs & (margin > 10 * error)).sum())
        errors.append(error)
        margins.append(margin)
    distinct = min(len(set(t.tokens[t.num_prompt :])) for t in texts)
    return Outcome(float(max(errors)), float(torch.cat(margins).median()), distinct, wrong)


def changed(shape: LayerShape, **changes: Any) -> LayerShape:
    spec = msgspec.structs.replace(AttentionSpec.decode(shape.spec), **changes)
    return msgspec.structs.replace(shape, spec=spec.encode())


def controls(layers: list[LayerShape]) -> dict[str, list[LayerShape]]:
    """The layers with one feature dropped, for each feature that they use."""
    specs = [AttentionSpec.decode(s.spec) for s in layers]
    broken = {"scale": [changed(s, scale=1.5 * p.scale) for s, p in zip(layers, specs, strict=True)]}
    for name, nothing in (("window", 0), ("softcap", 0.0), ("sinks", False), ("alibi", False)):
        if any(getattr(p, name) for p in specs):
            broken[name] = [changed(s, **{name: nothing}) for s in layers]
    return broken


@pytest.mark.long
@each_family()
def test_logits_are_those_of_transformers(case: Case) -> None:
    family, model, program = case
    layers = layer_shapes(program)
    assert {s.kv_heads for s in layers} == {family.kv_heads}
    outcome = compare(model, decode(LocalRunner(program, Memory(layers))))
    assert outcome.error < TOLERANCE
    assert outcome.wrong == 0
    assert outcome.distinct >= LEAST_DISTINCT
    assert outcome.margin > LEAST_MARGIN * outcome.error


@pytest.mark.long(but=["gpt-bigcode"])
@each_family()
def test_a_wrong_attention_is_noticed(case: Case) -> None:
    family, model, program = case
    layers = layer_shapes(program)
    broken = controls(layers)
    assert set(broken) == {"scale", *family.features}
    for name, wrong_layers in broken.items():
        outcome = compare(model, decode(LocalRunner(program, Memory(wrong_layers)), SHORT))
        assert outcome.error > RED * TOLERANCE, name


@pytest.mark.long(but=["olmo2", "cohere", "cohere2", "llama-gqa"])
@each_family()
def test_lost_keys_and_values_are_noticed(case: Case) -> None:
    family, model, program = case
    memory = Memory(layer_shapes(program))
    memory.zeroed_heads = max(1, family.kv_heads // 2)
    assert compare(model, decode(LocalRunner(program, memory), SHORT)).error > RED * TOLERANCE


OVER_TCP = ("llama-gqa", "gemma2", "gpt-oss")
# test_split.py takes every family through memory workers that are started once; this is the whole product, and slower.
OVER_WORKERS = [pytest.param("shm", f, marks=() if f.name in OVER_TCP else pytest.mark.slow) for f in FAMILIES]
OVER_WORKERS += [pytest.param("tcp", f) for f in FAMILIES if f.name in OVER_TCP]


@pytest.mark.long
@pytest.mark.parametrize(("transport", "family"), OVER_WORKERS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_tokens_over_memory_workers_are_those_of_transformers(transport: str, family: Family) -> None:
    """The product: KV in other processes."""
    model = family.build()
    model.generation_config.eos_token_id = None
    prompts = [t.tokens[: t.num_prompt] for t in ragged_texts(NEW_TOKENS)]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"memory_workers": 2, "transport": transport, "max_model_len": MAX_LEN}
    with LLM(model, prefill_chunk=16, **options) as llm:
        outputs = llm.generate(prompts, greedy)
        pids, stats = llm.pools.pids, llm.stats()
    memory = ["memory-0", "memory-1"]
    assert len({os.getpid(), *(pids[w] for w in memory)}) == 3, "memory workers are processes of their own"
    rows = sum(PROMPTS) + len(PROMPTS) * (NEW_TOKENS - 1)
    sent = llm.engine.worker_info.summary
    wire = rows * (sum(sent["q_bytes"]) + sum(sent["kv_bytes"]))
    assert sum(stats[w]["bytes_received"] for w in memory) >= wire
    assert all(stats[w]["bytes_received"] > (0 if family.kv_heads % 2 else wire / 2) for w in memory)
    agreement = lamina.tools.check.agreement.compare(model, outputs)
    assert agreement.identical, agreement
    assert agreement.num_tokens == len(PROMPTS) * NEW_TOKENS
    assert min(len(set(o.outputs[0].token_ids)) for o in outputs) >= LEAST_DISTINCT
