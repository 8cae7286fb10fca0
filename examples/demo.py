"""The main job, watched: one compute worker and two memory workers decode a model; then the numbers and the proof.

python examples/demo.py [MODEL] [--dtype float32] [--memory-workers 2] [--transport shm]
"""

from __future__ import annotations

import argparse
import sys
import time

from lamina import LLM, RequestOutput, SamplingParams

PROMPTS = [
    "def read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "The purpose of this module is to",
    "import os\n\n\ndef find_files(root, suffix):\n",
]


def main() -> int:
    """Exit status 1 when the tokens are not what transformers generates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="examples/tiny_lm/model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory-workers", type=int, default=2)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    try:
        return run(args)
    except ValueError as e:  # what can be put right: in one line
        print(f"demo: {e}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Exit status; ValueError for a model that cannot be served so."""
    with LLM(
        args.model,
        memory_workers=args.memory_workers,
        transport=args.transport,
        dtype=args.dtype,
        progress=True,
    ) as llm:
        print(f"\nworkers (name: process): {llm.pools.pids}\n")
        stream(llm, SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=args.max_tokens))
        start = time.perf_counter()
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=args.max_tokens, logprobs=0))
        table(llm, outputs, time.perf_counter() - start)
    return prove(args.model, args.dtype, outputs)


def stream(llm: LLM, params: SamplingParams) -> None:
    """Sample each prompt in turn and print its text as it comes."""
    for prompt in PROMPTS:
        print(f"\033[1m{prompt}\033[0m", end="", flush=True)
        shown = 0
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text[shown:], end="", flush=True)
            shown = len(output.outputs[0].text)
        print(f"\n{'-' * 72}")


def table(llm: LLM, outputs: list[RequestOutput], seconds: float) -> None:
    """Prints the cut, and where the time went. ``outputs``: of a greedy run that took ``seconds``."""
    summary, stats = llm.engine.worker_info.summary, llm.stats()
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    compute = stats["compute-0"]
    memory = [s for name, s in stats.items() if name.startswith("memory")]
    rows = [
        ("slices", f"{summary['num_slices']}"),
        ("bytes per token across a cut", spread(summary["cut_bytes_per_token"])),
        ("bytes per token and layer", "Q {}  KV {}  O {}".format(*(spread(summary[k]) for k in MESSAGES))),
        ("load / cut / bind", "  ".join(f"{summary[k]:.2f} s" for k in ("load_s", "convert_s", "bind_s"))),
        ("tokens per second", f"{tokens / seconds:.1f}  ({tokens} tokens, {len(outputs)} prompts at once)"),
        ("compute worker", COMPUTE.format(**compute)),
        *((f"memory worker {i}", f"attention {m['attend_s']:.2f} s, waiting {m['wait_s']:.2f} s")
          for i, m in enumerate(memory)),
    ]  # fmt: skip
    for name, value in rows:
        print(f"{name:<30} {value}")


def prove(model_path: str, dtype: str, outputs: list[RequestOutput]) -> int:
    """Run the same prompts through transformers and compare by the rule of lamina.tools.check.agreement."""
    from lamina.models.load import load
    from lamina.tools.check.agreement import compare

    agreement = compare(load(model_path, dtype=dtype).model, outputs)
    if dtype == "float32":
        verdict = "yes" if agreement.identical else "NO"
        print(f"identical to transformers generate: {verdict} ({agreement.num_tokens} tokens, fp32)")
        if agreement.num_ties or agreement.num_wrong:
            print(
                f"  ties {agreement.num_ties}, wrong {agreement.num_wrong}, worst margin {agreement.worst_margin:.2g}"
            )
        return 0 if agreement.identical else 1
    print(
        f"agreement with transformers in {dtype}: {agreement.share:.1%} of {agreement.num_tokens} tokens, "
        f"worst margin {agreement.worst_margin:.3g}, logit error {agreement.logit_error:.2g}"
    )
    return 0


COMPUTE = "slices {slice_s:.2f} s, sending {send_s:.2f} s, waiting for O {wait_s:.2f} s, sampling {sample_s:.2f} s"
MESSAGES = ("q_bytes", "kv_bytes", "o_bytes")


def spread(values: list[int]) -> str:
    """One number where all are equal, else the range."""
    return f"{values[0]}" if len(set(values)) == 1 else f"{min(values)}..{max(values)}"


if __name__ == "__main__":
    sys.exit(main())
