"""The reference text of several tests of workers on other hosts."""

from __future__ import annotations

from typing import NamedTuple

from forked import launch

MODEL = "examples/tiny_lm/model"
ASK = ("--prompt", "class Stack:", "--max-tokens", "16", "--ignore-eos", "--dtype", "float32")


class Known(NamedTuple):
    """The words of a `lamina-launch`, and the text that it prints where all workers are on this host."""

    command: tuple[str, ...]
    text: str


def generate() -> Known:
    command = ("generate", MODEL, *ASK)
    return Known(command, launch(*command, "--memory-workers", "1", env={"OMP_NUM_THREADS": "1"}))
