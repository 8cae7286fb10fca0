"""A wire that has no workers: a fake model whose next token depends on every token before it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from scheduled import begin

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.control import ComputeReady, RunRound, RunStep, SampledToken, StepDone

VOCAB, EOS = 97, 96


def next_token(tokens: Sequence[int]) -> int:
    return sum((i + 3) * (t + 1) for i, t in enumerate(tokens)) % (VOCAB - 1)


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeWire:
    """Executes rounds when they are collected, as late as can be. Batches overtake each other, as on the pools."""

    def __init__(self, num_blocks: int = 64, seed: int = 0) -> None:
        self.ready = ComputeReady(
            vocab_size=VOCAB, num_layers=3, max_model_len=128, dtype="float32", eos_token_ids=[EOS], windows=[0],
            kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[[num_blocks]], holders=[[0]], block_size=4, summary={},
        )  # fmt: skip
        self.tables = BlockTables([0], [num_blocks], 4)
        self.stored: dict[int, list[int]] = {}
        self.drawn: dict[int, dict[int, int]] = {}  # batch -> sequence -> token
        self.flight: deque[RunRound] = deque()
        self.done: list[StepDone] = []
        self.order = random.Random(seed)
        self.is_closed = False

    def submit(self, new: RunRound) -> None:
        assert [s.plan.has_more for s in new.steps] == [True] * (len(new.steps) - 1) + [False]
        self.flight.append(new)

    def wait(self) -> StepDone:
        if not self.done or (self.flight and self.order.random() < 0.3):
            self.done += [self.execute(s) for s in self.flight.popleft().steps]
        first = {d.batch: d for d in reversed(self.done)}
        done = first[self.order.choice(sorted(first))]
        self.done.remove(done)
        return done

    def execute(self, step: RunStep) -> StepDone:
        self.tables.apply(step.plan)
        begin(step.plan, self.stored)
        at = 0
        for rows in step.plan.rows:
            tokens = step.token_ids[at : at + rows.count]
            at += rows.count
            last = self.drawn.get(step.plan.batch, {})
            self.stored[rows.sequence][rows.first :] = [last[rows.sequence] if t == -1 else t for t in tokens]
        drawn = []
        for d in step.sampling_requests:
            token = next_token(self.stored[d.sequence])
            drawn.append(SampledToken(d.sequence, (token + 1) % (VOCAB - 1) if token in d.banned_token_ids else token))
        self.drawn[step.plan.batch] = {d.sequence: d.token_id for d in drawn}
        return StepDone(batch=step.plan.batch, step=step.plan.step, sampled_tokens=drawn)

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def begin_era(self) -> bytes:
        return b""

    def check_workers(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Letters:
    """A tokenizer in which token t is the letter chr(65 + t % 26)."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(65 + t % 26) for t in token_ids)

    def finish(self) -> str:
        return ""

    def special_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        return {}
