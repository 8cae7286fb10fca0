"""The cost of --kv-sparsity, on the demo's language model. Real workers.

recall: key-value pairs, then ordinary text, then one question; one line for each distance, number of pairs and budget.
The question is part of the prompt (``seen``), or comes when the prompt is stored and has lost blocks, a token at a time
(``later``). bits: of each byte of ordinary text after a prompt, a token at a time. peers: the first one's questions
answered by other projects, which peers/install.sh installs.

    python perf/bench_kv_sparsity.py --write
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import parser_of, record
from peers.recall import ENVIRONMENTS, PEERS, RecallPeer

from lamina import LLM, SamplingParams
from lamina.models.tokenizer import load_tokenizer
from lamina.scheduler.sparsity.pruning import BlockPruner

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_lm.corpus import held_out_text  # noqa: E402
from tiny_lm.recall import RecallPrompt, RecallTask  # noqa: E402

MODEL = EXAMPLES / "tiny_lm" / "model"
DISTANCES = (256, 1024, 1800)
PAIRS = (4, 24)
FORMS, ORDERS = ("evict", "select"), ("seen", "later")
AT_ONCE = 16  # questions
SHARES = (1.0, 0.5, 0.25, 0.1)  # of the prompt's tokens; 1: all
RECENT, LEAST, SIZE = 16, 4, 16  # tokens that stay, blocks of a budget, tokens of a block


def right(llm: LLM, prompts: list[RecallPrompt], order: str) -> float:
    """Share of questions that greedy decoding answers."""
    if order == "later":
        parts = [prompts[i : i + AT_ONCE] for i in range(0, len(prompts), AT_ONCE)]
        return sum(_right_later(llm, part) for part in parts) / len(prompts)
    params = SamplingParams(temperature=0.0, max_tokens=len(prompts[0].answer), ignore_eos=True)
    outputs = llm.generate([p.tokens for p in prompts], params, use_tqdm=False)
    return sum(o.outputs[0].token_ids == p.answer for o, p in zip(outputs, prompts, strict=True)) / len(prompts)


def _right_later(llm: LLM, prompts: list[RecallPrompt]) -> int:
    asked, length = [p.tokens[-p.asked :] for p in prompts], len(prompts[0].answer)
    answers: list[list[int]] = [[] for _ in prompts]
    with llm.lockstep([p.tokens[: -p.asked] for p in prompts], prompts[0].asked + length) as rows:
        for tokens in zip(*asked, strict=True):
            rows.logits()
            rows.choose(tokens)
        for _ in range(length):
            best = [int(np.frombuffer(logits, "<f4").argmax()) for logits in rows.logits()]
            rows.choose(best)
            for answer, token in zip(answers, best, strict=True):
                answer.append(token)
    return sum(answer == p.answer for answer, p in zip(answers, prompts, strict=True))


def bits_per_byte(llm: LLM, tokenizer: Any, texts: Sequence[list[int]], prompt: int) -> float:
    """Returns the bits of all that follows the first ``prompt`` tokens of each text: all are equally long."""
    loss, nbytes = 0.0, sum(len(tokenizer.decode(text[prompt:]).encode()) for text in texts)
    for at in range(0, len(texts), AT_ONCE):
        part = texts[at : at + AT_ONCE]
        with llm.lockstep([text[:prompt] for text in part], len(part[0]) - prompt) as rows:
            for tokens in zip(*(text[prompt:] for text in part), strict=True):
                logits = np.stack([np.frombuffer(x, "<f4") for x in rows.logits()]).astype(np.float64)
                high = logits.max(1)
                loss += float((high + np.log(np.exp(logits - high[:, None]).sum(1))).sum())
                loss -= float(logits[np.arange(len(part)), tokens].sum())
                rows.choose(tokens)
    return loss / math.log(2) / nbytes


def held_out_tokens(tokenizer: Any) -> npt.NDArray[np.int64]:
    """Returns tokens of ordinary text that the model has not seen."""
    return np.array(tokenizer.encode(held_out_text(), add_special_tokens=False, verbose=False))


def budget_of(length: int, share: float, size: int = SIZE) -> int:
    """Tokens that stay of so many, in blocks of ``size``."""
    return max(LEAST, int(length * share) // size) * size if share < 1 else length


def recall_prompts(
    tokenizer: Any, text: npt.NDArray[np.int64], distance: int, *, count: int, pairs: int
) -> list[RecallPrompt]:
    """Questions about one of so many pairs, with so many tokens of ``text`` after them."""
    return RecallTask(tokenizer).prompts(text, distance, count=count, pairs=pairs)


class SparsityCosts:
    """The common fields of the rows of all measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.tokenizer = args, load_tokenizer(str(MODEL), trust_remote_code=False)
        self._filler = held_out_tokens(self.tokenizer)

    def questions(self, distance: int) -> dict[int, list[RecallPrompt]]:
        """Returns questions by number of pairs."""
        given = self.tokenizer, self._filler, distance
        return {n: recall_prompts(*given, count=self.args.prompts, pairs=n) for n in PAIRS}

    def engine(self, form: str, budget: int) -> LLM:
        """One that keeps or attends so many tokens."""
        options: dict[str, Any] = {"kv_sparsity": form}
        if form != "none":
            options |= {"kv_budget": budget, "kv_recent": self.args.recent, "kv_full_layers": self.args.full_layers}
        if form == "evict":
            options |= {"kv_observation_window": self.args.window}
        return LLM(
            str(MODEL), transport="loopback", block_size=self.args.block_size, enable_prefix_caching=False, **options
        )

    def recall(self) -> Iterator[dict[str, Any]]:
        """Returns the recall of the engine."""
        args = self.args
        for distance, share in product(args.distances, args.shares):
            asked = self.questions(distance)
            for form, (pairs, prompts) in product(args.forms if share < 1 else ["none"], asked.items()):
                length = max(len(p.tokens) for p in prompts)
                budget = args.kv_budget or budget_of(length, share, args.block_size)
                kept = round(budget / length, 3) if args.kv_budget else share
                for order in args.orders:
                    with self.engine(form, budget) as llm:
                        answered = right(llm, prompts, order)
                        evictions = llm.engine.scheduler.features.get(BlockPruner)
                    yield {
                        "form": form, "order": order, "distance": distance, "pairs": pairs, "share": kept,
                        "budget": budget, "length": length, "recall": answered,
                        "dropped_blocks": evictions.num_dropped if evictions else 0,
                    }  # fmt: skip

    def bits(self, prompt: int = 1024, behind: int = 256) -> Iterator[dict[str, Any]]:
        """Returns the bits of the engine, and those with all KV."""
        starts = np.linspace(0, len(self._filler) - prompt - behind, self.args.prompts).astype(int)
        texts = [self._filler[at : at + prompt + behind].tolist() for at in starts]
        whole = 0.0
        for share, form in [(1.0, "none"), *product([s for s in self.args.shares if s < 1], self.args.forms)]:
            budget = budget_of(prompt, share, self.args.block_size)
            with self.engine(form, budget) as llm:
                bits = bits_per_byte(llm, self.tokenizer, texts, prompt)
            whole = whole or bits
            yield {
                "form": form, "share": share, "budget": budget, "length": prompt, "tokens": behind,
                "bits_per_byte": bits, "of_all_kv": bits / whole,
            }  # fmt: skip

    def peers(self) -> Iterator[dict[str, Any]]:
        """The same questions, answered by others."""
        args = self.args
        with tempfile.TemporaryDirectory() as folder:
            for name in args.peers:
                python = args.peer_folder / ENVIRONMENTS[name] / "bin/python"
                try:
                    peer = RecallPeer(str(python), name, MODEL, Path(folder))
                except (OSError, RuntimeError) as e:
                    yield {"form": name, "missing": str(e)}
                    continue
                for distance, share, order in product(args.distances, args.shares, args.orders):
                    for pairs, prompts in self.questions(distance).items():
                        yield {
                            "form": name, "order": order, "distance": distance, "pairs": pairs, "share": share,
                            **self._by_peer(peer, prompts, order, share),
                        }  # fmt: skip
                peer.close()

    def _by_peer(self, peer: RecallPeer, prompts: list[RecallPrompt], order: str, share: float) -> dict[str, Any]:
        length, answered = max(len(p.tokens) for p in prompts), 0
        budget = budget_of(length, share)
        try:
            for p in prompts:
                answered += peer.answer(p.tokens, p.asked, len(p.answer), order, budget) == p.answer
        except RuntimeError as e:
            return {"missing": str(e)}
        return {"budget": budget, "length": length, "recall": answered / len(prompts)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--measure", nargs="+", default=["recall", "bits"], choices=["recall", "bits", "peers"])
    parser.add_argument("--prompts", type=int, default=64, help="questions, or texts, of each row")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES, help="tokens of text between")
    parser.add_argument("--full-layers", type=int, default=1, help="layers that keep all")
    parser.add_argument("--window", type=int, default=4, help="--kv-window of evict")
    parser.add_argument("--block-size", type=int, default=SIZE, help="tokens")
    parser.add_argument("--recent", type=int, default=RECENT, help="--kv-recent")
    parser.add_argument("--kv-budget", type=int, default=0, help="of recall, in place of the share")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the prompt's tokens; 1: all")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS, help="of --kv-sparsity")
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS, help="when the question comes")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS), help="of --measure peers")
    parser.add_argument("--peer-folder", type=Path, default=Path("build/peers"), help="their environments")
    args = parser.parse_args()
    settings = {"prompts": args.prompts, "full_layers": args.full_layers, "window": args.window}
    settings |= {"block_size": args.block_size, "recent": args.recent}
    costs = SparsityCosts(args)
    for what in args.measure:
        for line in getattr(costs, what)():
            record("bench_kv_sparsity", settings, {"measure": what, **line}, write=args.write)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
