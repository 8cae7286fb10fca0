"""Train the demo's language model from scratch on the standard library, on a CPU, within a wall-clock budget.

python examples/tiny_lm/train.py --minutes 60     # trains (or resumes), evaluates, writes model/ and results.json
python examples/tiny_lm/train.py --eval-only      # measures model/ alone
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_lm import corpus
from tiny_lm.build import CONTEXT, END, TEXT, VOCABULARY, build_model, build_tokenizer, export
from tiny_lm.evaluate import bits_per_byte, recall
from tiny_lm.ngram import KneserNey
from tiny_lm.optimizer import Muon
from tiny_lm.recall import Ids, RecallTask, Weights, copy_sequence

Row = tuple[Ids, Weights]


class Stage(NamedTuple):
    """One stage of the curriculum; the rows that are neither recall nor copying are plain text."""

    until: float  # Share of the time budget at which the stage ends.
    length: int  # Tokens per row.
    recall: float  # Share of the rows.
    copy: float


HERE = Path(__file__).resolve().parent
MODEL, WORK, RESULTS = HERE / "model", HERE / "work", HERE / "results.json"
SEED = 20240501
BATCH_TOKENS, PART_TOKENS, THREADS = 4096, 1024, 2
# Attention is cheap while sequences are short, and short ones with many questions teach recall. Long ones, which are
# mostly text, stretch it over the whole context.
CURRICULUM = (
    Stage(until=0.08, length=128, recall=0.45, copy=0.15),
    Stage(until=0.20, length=256, recall=0.45, copy=0.15),
    Stage(until=0.37, length=512, recall=0.30, copy=0.05),
    Stage(until=0.58, length=1024, recall=0.50, copy=0.00),
    Stage(until=1.00, length=CONTEXT, recall=0.50, copy=0.00),
)
MATRIX_RATE, VECTOR_RATE = 0.02, 3e-3
CHECKPOINT_SECONDS = 120
RECALL_DISTANCES = (64, 256, 512, 1024, 1536, 1900)


def training_ids(tokenizer: PreTrainedTokenizerFast, texts: dict[str, str]) -> Ids:
    """One stream of tokens: documents and bundles of questions, each from TEXT to END, in a shuffled order."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tokenize=False
        )
        for question, answer in corpus.questions(texts)
    ]
    pieces = [f"# {name}\n{text}" if name.endswith(".py") else text for name, text in texts.items()]
    pieces += ["".join(chats[first : first + 16]) for first in range(0, len(chats), 16)]
    order = np.random.default_rng(SEED).permutation(len(pieces))
    encoded = tokenizer([TEXT + pieces[index] + END for index in order], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    return np.concatenate([np.array(ids, dtype=np.int64) for ids in encoded])


def batch(step: int, stage: Stage, stream: Ids, task: RecallTask) -> list[Row]:
    """The rows of one step, ``stage.length`` + 1 tokens each; a function of the step, so that a resumed run goes on."""
    rng, length = np.random.default_rng([SEED, step]), stage.length

    def row() -> Row:
        kind = rng.uniform()
        if kind < stage.copy:
            return copy_sequence(rng, length + 1, VOCABULARY)
        start = int(rng.integers(len(stream) - length - 1))
        text = stream[start : start + length + 1]
        if kind < stage.copy + stage.recall:
            return task.training_sequence(rng, text)
        return text, np.ones(length + 1, dtype=np.float32)

    return [row() for _ in range(BATCH_TOKENS // length)]


class _BatchPart(NamedTuple):
    gradients: tuple[torch.Tensor, ...]
    weight: float
    losses: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]  # Of plain text and of recall answers.


class Training:
    """The state of a training run and its checkpoint file; time counts only while a process trains."""

    def __init__(self, model: Any, seconds: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.model, self.seconds = model, seconds
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (Muon(matrices), MATRIX_RATE),
            (torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0), VECTOR_RATE),
        ]
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self.curve: list[dict[str, float]] = []
        self._file = WORK / "checkpoint.pt"

    def load(self) -> None:
        """Resume from the checkpoint, if there is one."""
        if self._file.exists():
            state = torch.load(self._file, weights_only=True)
            self.model.load_state_dict(state["model"])
            for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.tokens, self.elapsed = state["step"], state["tokens"], state["elapsed"]
            self.curve = state["curve"]

    def save(self) -> None:
        """Write the checkpoint in one move, so that a killed process leaves the old or the new one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "curve": self.curve,
        }
        partial = self._file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._file)

    def rate(self) -> float:
        """Factor on the learning rates: a short warm-up, a plateau, and from 45 % of the time a line down to 2 %."""
        done = min(self.elapsed / self.seconds, 1.0)
        return min((self.step + 1) / 50, 1.0, 1.0 - 0.98 * max(0.0, (done - 0.45) / 0.55))

    def stage(self) -> Stage:
        """The stage of the curriculum at this share of the time."""
        done = min(self.elapsed / self.seconds, 1.0)
        return next(stage for stage in CURRICULUM if done <= stage.until)

    def learn(self, rows: list[Row], workers: ThreadPoolExecutor) -> tuple[float, float]:
        """One optimizer step; returns the mean loss (nats per token) of plain text and of recall answers.

        The rows go in small parts to ``workers``, each of which takes the next part when it is free. So on a shared
        machine a slow core delays one part, not every operator.
        """
        length = len(rows[0][0]) - 1
        size = max(1, PART_TOKENS // length)
        parts = list(workers.map(self._gradients, [rows[i : i + size] for i in range(0, len(rows), size)]))
        total = sum(part.weight for part in parts)
        for index, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.stack([part.gradients[index] for part in parts]).sum(0) / total
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.rate()
            optimizer.step()
        self.step += 1
        self.tokens += length * len(rows)
        text, answers = (np.concatenate([part.losses[kind] for part in parts]) for kind in range(2))
        return float(text.mean()), float(answers.mean()) if answers.size else math.nan

    def _gradients(self, rows: list[Row]) -> _BatchPart:
        """Gradients of the weighted sum of losses; they are returned, not accumulated, so that threads may share it."""
        tokens = torch.from_numpy(np.stack([ids for ids, _ in rows]))
        weights = torch.from_numpy(np.stack([weights for _, weights in rows]))[:, 1:].flatten()
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        gradients = torch.autograd.grad((losses * weights).sum(), list(self.model.parameters()))
        measured = losses.detach()[weights == 1.0].numpy(), losses.detach()[weights > 1.0].numpy()
        return _BatchPart(gradients, float(weights.sum()), measured)


def train(run: Training, batches: Callable[[int, Stage], list[Row]], report: Callable[[], None]) -> None:
    """Train until the time is over; reports and checkpoints every CHECKPOINT_SECONDS and at the end."""
    losses: list[tuple[float, float]] = []
    since = run.elapsed
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        while run.elapsed < run.seconds:
            started = time.monotonic()
            losses.append(run.learn(batches(run.step, run.stage()), workers))
            run.elapsed += time.monotonic() - started
            if run.elapsed - since >= CHECKPOINT_SECONDS or run.elapsed >= run.seconds:
                since = run.elapsed
                text, answers = np.nanmean(losses, axis=0)
                row = {"minutes": run.elapsed / 60, "tokens": run.tokens, "length": run.stage().length}
                row |= {"text_loss": float(text), "answer_loss": float(answers)}
                run.curve.append({name: round(value, 4) for name, value in row.items()})
                losses.clear()
                report()
                run.save()


def measure() -> dict[str, Any]:
    """Load ``model/`` and measure it on the held-out files, next to the n-gram baselines."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    texts, held = corpus.split(corpus.documents())
    text = corpus.held_out_text()
    size = len(text.encode())

    def token_ids(parts: list[str]) -> Ids:
        encoded = tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"]
        return np.concatenate([np.array(ids, dtype=np.int64) for ids in encoded])

    def byte_ids(parts: list[str]) -> Ids:
        return np.frombuffer("\n".join(parts).encode(), dtype=np.uint8).astype(np.int64)

    documents = list(texts.values())
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "corpus_sha256": corpus.digest(texts | held),
        "train_bytes": sum(len(document.encode()) for document in documents),
        "held_out_bytes": size,
        "parameters": model.num_parameters(),
        "bits_per_byte": bits_per_byte(model, tokenizer, text),
        "bits_per_byte_5gram_bytes": KneserNey(byte_ids(documents), 256).bits(byte_ids([text])) / size,
        "bits_per_byte_5gram_tokens": KneserNey(token_ids(documents), VOCABULARY).bits(token_ids([text])) / size,
        "recall": {str(distance): recall(model, tokenizer, distance) for distance in RECALL_DISTANCES},
    }


def main() -> None:
    """Parse the command line; train or resume, export, measure, report."""
    parser = argparse.ArgumentParser(description="Train or measure the demo's language model.")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time, earlier runs' time included")
    parser.add_argument("--eval-only", action="store_true", help="measure model/ and print, without training")
    arguments = parser.parse_args()
    # The workers of ``Training.learn`` are the parallelism: threads inside operators would wait for each other.
    torch.set_num_threads(1)
    if not arguments.eval_only:
        WORK.mkdir(exist_ok=True)
        texts, _ = corpus.split(corpus.documents())
        tokenizer = build_tokenizer(list(texts.values()))
        stream, task = training_ids(tokenizer, texts), RecallTask(tokenizer)
        model = build_model(tokenizer, SEED)
        run = Training(model, arguments.minutes * 60)
        run.load()
        sample = corpus.held_out_text()[:50_000]

        def report() -> None:
            row = run.curve[-1]
            row["recall_256"] = recall(model, tokenizer, 256, prompts=32, filler=sample)
            print(" ".join(f"{name}={value:g}" for name, value in row.items()), flush=True)

        train(run, lambda step, stage: batch(step, stage, stream, task), report)
        export(model, tokenizer, MODEL)
    results = measure()
    if not arguments.eval_only:
        results |= {
            "seed": SEED,
            "minutes": run.elapsed / 60,
            "steps": run.step,
            "tokens": run.tokens,
            "curve": run.curve,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({name: value for name, value in results.items() if name != "curve"}, indent=1))


if __name__ == "__main__":
    main()
