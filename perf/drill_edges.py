"""The frequency with which rounding changes a drawn token, and whether a drill recognizes that it was an edge.

Logits of a model for its own texts get noise, as KV that is built again gives them, and each row is drawn again with
the same number. A draw that parts is judged by the drill's own verdict, which pushes logits by as much as the largest
error of some log-probabilities, or up to ten times that. It is also judged by pushes of one, three and ten times that
alone. Prints a JSON line; --write appends it to perf/results/drill_edges.jsonl.

    python perf/drill_edges.py examples/tiny_lm/model --write
"""

from __future__ import annotations

import random
from typing import Any

import torch
from common import parser_of, record
from torch import Tensor

from lamina.ops.sampling.sampler import Sampler
from lamina.protocol.control import SamplingRequest
from lamina.tools.drill.client_streams import StreamRecord, bodies_of
from lamina.tools.drill.stream_verdicts import first_divergence, is_numeric_tie, verdict, with_logit_bias

SCORED = 1_000  # log-probabilities of a hit that are compared: the largest error is one of so many
FIXED = 1.0, 3.0, 10.0
SAMPLER = Sampler(1)


def logits_of(path: str, streams: int, tokens: int) -> Tensor:
    """[rows, V] fp32, for each token that the model draws after prompts of a drill."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    rows = list[Tensor]()
    for body in bodies_of(streams, tokens, random.Random(0)):
        prompt = torch.tensor([tokenizer(body["prompt"])["input_ids"]])
        with torch.inference_mode():
            text = model.float().generate(prompt, max_new_tokens=tokens, do_sample=True, pad_token_id=0)
            rows.append(model(text).logits[0, prompt.shape[1] - 1 : -1])
    return torch.cat(rows)


def drawn(logits: Tensor, temperature: float, seeds: list[int]) -> list[int]:
    """A token of each row."""
    draws = [
        SamplingRequest(
            row=i, sequence=i, temperature=temperature, top_k=0, top_p=1.0, seed=s, output_index=0, logprobs=-1
        )
        for i, s in enumerate(seeds)
    ]
    return [d.token_id for d in SAMPLER.sample(logits, draws)]


def told(token: int) -> StreamRecord:
    """A stream of that one."""
    return StreamRecord({0: ""}, {0: [token]}, {}, {0: "length"}, 1, "")


def judge(row: Tensor, temperature: float, seed: int, tokens: tuple[int, int], error: float) -> tuple[bool, bool]:
    """Returns whether an undisturbed run yields the second of two tokens with some push, and with one of fixed size."""
    body, (one, other) = {"temperature": temperature}, tokens

    def read(body: dict[str, Any]) -> StreamRecord:
        logits = row.clone()
        for token, bias in body["logit_bias"].items():
            logits[int(token)] += bias
        return told(drawn(logits[None], temperature, [seed])[0])

    fork = first_divergence(told(other), told(one))
    assert fork is not None
    fixed = any(verdict(told(other), read(with_logit_bias(body, fork, x * error))) == "right" for x in FIXED)
    return is_numeric_tie(told(other), told(one), body, error, read), fixed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=16, help="texts (16)")
    parser.add_argument("--tokens", type=int, default=64, help="of each (64)")
    parser.add_argument("--turns", type=int, default=500, help="of all rows (500)")
    parser.add_argument("--noise", type=float, default=2e-6, help="of logits, a standard deviation (2e-6)")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, rng = logits_of(args.model, args.streams, args.tokens), torch.Generator().manual_seed(0)
    error = args.noise * float(torch.randn(SCORED, generator=rng).abs().max())
    parted = edges = by_fixed = 0
    for turn in range(args.turns):
        seeds = [turn * len(rows) + i for i in range(len(rows))]
        noisy = rows + args.noise * torch.randn(rows.shape, generator=rng)
        pairs = zip(drawn(rows, args.temperature, seeds), drawn(noisy, args.temperature, seeds), strict=True)
        for i, tokens in enumerate(pairs):
            if tokens[0] != tokens[1]:
                some, fixed = judge(rows[i], args.temperature, seeds[i], tokens, error)
                parted, edges, by_fixed = parted + 1, edges + some, by_fixed + fixed
    settings = {k: v for k, v in vars(args).items() if k != "write"}
    results = {"draws": args.turns * len(rows), "parted": parted, "edges": edges, "edges_by_fixed_pushes": by_fixed}
    print(record("drill_edges", settings, results, write=args.write))


if __name__ == "__main__":
    main()
