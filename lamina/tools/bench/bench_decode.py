"""``lamina-launch bench decode MODEL``: decode steps of one batch, timed in the driver."""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import TYPE_CHECKING, Any

from lamina.cli.common.config_file import add_config_flag
from lamina.cli.common.flags import add_engine_flags, check_at_least, engine_config, print_config
from lamina.cli.common.parser import Parser
from lamina.config.flat_options import flat_options
from lamina.facts.report import count_text, table

from .bench_report import spread_ms, spread_table

if TYPE_CHECKING:
    from lamina.api.llm import LLM
    from lamina.config.engine_config import EngineConfig

# One step is always in flight and one is drained after the last: no sequence may end while steps are timed.
SPARE_TOKENS = 3


def add_arguments(parser: Parser) -> None:
    """Add the flags of this benchmark, and all of the engine."""
    parser.add_argument("model", help="a directory, a GGUF file or a hub id")
    group = parser.add_argument_group("load")
    group.add_argument("--batch-size", type=int, default=8, help="sequences that decode together")
    group.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    group.add_argument("--output-len", type=int, default=64, help="tokens decoded by each sequence, and timed")
    group.add_argument("--num-warmups", type=int, default=4, help="steps before, which do not count")
    group.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    add_config_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns exit status 0. Raises ValueError, WorkerError."""
    check_at_least(args, 1, "batch_size", "input_len", "output_len")
    config = engine_config(args)
    if args.print_config:
        print_config(config, model=args.model)
        return 0
    if args.batch_size > config.batching.max_num_seqs:
        raise ValueError(f"--batch-size {args.batch_size} is above --max-num-seqs {config.batching.max_num_seqs}")
    if args.dry_run:
        return _dry_run(args, config)
    from lamina.api.llm import CommandLLM

    with CommandLLM(args.model, **flat_options(config)) as llm:
        result = measure(llm, args.batch_size, args.input_len, args.output_len, args.num_warmups, args.seed)
    settings = {"model": args.model, "batch_size": args.batch_size, "input_len": args.input_len}
    result = {**settings, "output_len": args.output_len, **result}
    print(json.dumps(result) if args.json else _table(result))
    return 0


def _dry_run(args: argparse.Namespace, config: EngineConfig) -> int:
    from lamina.cli.common.preflight import check, workers_that_would_start

    _check_room(args.input_len, args.output_len + args.num_warmups, check(args.model, config))
    print(workers_that_would_start(args.model, config))
    prompts, tokens = count_text(args.batch_size, "prompt"), count_text(args.output_len, "token")
    print(f"would decode {tokens} after each of {prompts} of {count_text(args.input_len, 'token')}")
    return 0


def measure(llm: LLM, batch: int, input_len: int, output_len: int, warm: int, seed: int = 0) -> dict[str, Any]:
    """Prefill ``batch`` random prompts, then time each step of the whole batch. Times in ms, rates in tokens/s."""
    from lamina.request import SamplingParams

    engine, rng = llm.engine, random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output_len + warm + SPARE_TOKENS, ignore_eos=True)
    _check_room(input_len, output_len + warm, engine.worker_info.max_model_len)
    vocab = engine.worker_info.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(input_len)] for _ in range(batch)]
    begin = time.perf_counter()
    ids = [engine.add(p, params) for p in prompts]
    try:
        while len(engine.step()) < batch:
            pass
        prefill_s = time.perf_counter() - begin
        for _ in range(warm):
            engine.step()
        before, steps = llm.stats(), []
        for _ in range(output_len):
            start = time.perf_counter()
            grown = engine.step()
            steps.append(time.perf_counter() - start)
            if len(grown) != batch:
                raise ValueError(
                    f"{len(grown)} of {batch} sequences decode together: give more --kv-cache-memory-bytes"
                )
        after = llm.stats()
    finally:
        for request_id in ids:
            engine.cancel(request_id)
    return {
        "output_throughput": batch * output_len / sum(steps),
        "prefill_throughput": batch * input_len / prefill_s,
        **spread_ms("step", steps),
        "seconds_by_worker": {w: _seconds(after[w], before[w]) for w in after},
    }


def _check_room(input_len: int, decoded: int, limit: int) -> None:
    if input_len + decoded + SPARE_TOKENS > limit:
        raise ValueError(
            f"--input-len {input_len} leaves no room for {decoded + SPARE_TOKENS} more tokens, warm-ups included: a "
            f"sequence has at most {limit}"
        )


def _seconds(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {k: after[k] - before.get(k, 0.0) for k in after if k.endswith("_s")}


def _table(result: dict[str, Any]) -> str:
    rates = {f"{name} tokens/s": f"{result[f'{name}_throughput']:.1f}" for name in ("output", "prefill")}
    rows = [list(rate) for rate in rates.items()]
    rows += [
        [worker, "  ".join(f"{k.removesuffix('_s')} {v:.3f} s" for k, v in seconds.items())]
        for worker, seconds in result["seconds_by_worker"].items()
    ]
    return "\n".join([*table(rows), *spread_table(result, {"a step": "step"})])
