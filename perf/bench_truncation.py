"""The cost of truncation without recomputation in quality. One measure is nats a token of the shipped model on held-out
text, after a context that was cut, by what its KV is. The other is the share of questions that it answers after a cut.

Each text fills the context but for --new tokens. --ratio of the context goes, after the first --keep tokens. The next
--new tokens are scored after what is left, and the first NEAR of them apart. Further on, new text, whose KV is always
right, gives the model more and more of what it needs. "moved": its KV is kept, and K is rotated as a memory worker
does. "naive": kept and not rotated. "recomputed": what is left is computed anew. Differences are paired by text.
Questions are about one of four pairs that were stated 1,024 tokens before, after the discarded ones; the cut comes
between statement and question. Prints one JSON line; --write appends it to perf/results/bench_truncation.jsonl.

    python perf/bench_truncation.py --texts 200 --write
    python perf/bench_truncation.py --texts 200 --keep 0 --write    # no first tokens are kept, as in the paper
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from common import parser_of, record
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lamina.kv.rope_shift import rotate_keys
from lamina.protocol.step_plan import Rotary

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
from tiny_lm.corpus import held_out_text  # noqa: E402
from tiny_lm.recall import RecallPrompt, RecallTask  # noqa: E402

ONE_SIDED_95 = 1.645
WAYS = ("moved", "naive", "recomputed")
NEAR = 32
CONTEXT, DISTANCE = 2048, 1024  # tokens; the second one from a statement to its question


class Scorer:
    """A model, and a cache that is cut by hand."""

    def __init__(self, path: Path, keep: int, gone: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        frequencies = self._model.model.rotary_emb.inv_freq.double().numpy()
        self._rotary, self._keep, self._gone = Rotary(frequencies.astype("<f8").tobytes()), keep, gone

    @torch.inference_mode()
    def nats(self, history: Tensor, new: Tensor) -> dict[str, Tensor]:
        """Returns nats of each token of ``new`` [n] but the first: [n - 1], by way."""
        length = len(history) - self._gone
        logits = {way: self._logits(cache, length, new) for way, cache in self._cut(history).items()}
        loss = torch.nn.functional.cross_entropy
        return {way: loss(x[:-1], new[1:], reduction="none") for way, x in logits.items()}

    @torch.inference_mode()
    def answers(self, history: Tensor, new: Tensor, answer: list[int]) -> dict[str, bool]:
        """Returns whether the greedy continuation of ``new`` is ``answer``, by way."""
        right, length = dict[str, bool](), len(history) - self._gone
        for way, cache in self._cut(history).items():
            given, told, at = new, list[int](), length
            for _ in answer:
                told.append(int(self._logits(cache, at, given)[-1].argmax()))
                given, at = torch.tensor(told[-1:]), at + len(given)
            right[way] = told == answer
        return right

    def _cut(self, history: Tensor) -> dict[str, Any]:
        """A cache of what is left of ``history``, by way."""
        keep, gone = self._keep, self._gone
        caches = {"recomputed": self._cache(torch.cat([history[:keep], history[keep + gone :]]))}
        whole = self._cache(history)
        for way in ("naive", "moved"):
            cache = DynamicCache(config=self._model.config)
            for number, layer in enumerate(whole.layers):
                k, v = (torch.cat([x[:, :, :keep], x[:, :, keep + gone :]], 2) for x in (layer.keys, layer.values))
                if way == "moved":
                    k[:, :, keep:] = rotate_keys(k[:, :, keep:], self._rotary, -gone)
                cache.update(k, v, number)
            caches[way] = cache
        return caches

    def _cache(self, tokens: Tensor) -> Any:
        cache = DynamicCache(config=self._model.config)
        self._model(tokens[None], past_key_values=cache, logits_to_keep=1)
        return cache

    def _logits(self, cache: Any, length: int, new: Tensor) -> Tensor:
        at = torch.arange(length, length + len(new))
        told = self._model(new[None], position_ids=at[None], past_key_values=cache, cache_position=at)
        logits: Tensor = told.logits[0]
        return logits


def _split(filler: Tensor, prompt: RecallPrompt, before: int, history: int) -> tuple[Tensor, Tensor]:
    """A text with ``before`` tokens in front of the statements, and where the cut comes."""
    text = torch.cat([filler[:before], torch.tensor(prompt.tokens)])
    return text[:history], text[history:]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLES / "tiny_lm" / "model")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--new", type=int, default=256, help="tokens that are scored")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--keep", type=int, default=128)
    parser.add_argument("--questions", type=int, default=200)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer.encode(held_out_text(), add_special_tokens=False, verbose=False))
    history, gone = CONTEXT - args.new, int(CONTEXT * args.ratio)
    starts = torch.linspace(0, len(ids) - CONTEXT - 1, args.texts).long().tolist()
    scorer = Scorer(args.model, args.keep, gone)
    runs = [scorer.nats(ids[s : s + history], ids[s + history : s + CONTEXT]) for s in starts]
    asked = RecallTask(tokenizer).prompts(ids.numpy(), DISTANCE, count=args.questions)
    right = [scorer.answers(*_split(ids, prompt, args.keep + gone, history), prompt.answer) for prompt in asked]
    names = ("texts", "new", "ratio", "keep", "questions")
    settings = {name: getattr(args, name) for name in names}
    near = {way: statistics.fmean(float(run[way][:NEAR].mean()) for run in runs) for way in WAYS}
    means = {way: statistics.fmean(float(run[way].mean()) for run in runs) for way in WAYS}
    told: dict[str, Any] = {f"{way}_nats": round(means[way], 4) for way in WAYS}
    told |= {f"{way}_perplexity": round(math.exp(means[way]), 3) for way in WAYS}
    told |= {f"{way}_perplexity_of_first_{NEAR}": round(math.exp(near[way]), 3) for way in WAYS}
    differences = [float((run["moved"] - run["recomputed"]).mean()) for run in runs]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(runs))
    told |= {"moved_over_recomputed": round(mean, 5), "upper_95": round(mean + ONE_SIDED_95 * error, 5)}
    told["recall"] = {way: statistics.fmean(each[way] for each in right) for way in WAYS}
    told["naive_over_recomputed"] = {
        name: round(math.exp(each["naive"] - each["recomputed"]), 3)
        for name, each in ((f"first {NEAR}", near), ("all", means))
    }
    print(record(Path(__file__).stem, settings, told, write=args.write))


if __name__ == "__main__":
    main()
