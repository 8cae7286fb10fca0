"""The time of a decode step of a whole engine by --kv-sparsity. Engines that keep and attend all, evict and select are
alike but for that, and decode in turns of a few steps on the same cores. Wall time of a step, tokens a second, CPU time
of the workers, K and V that attention reads, and what of the time is attention and scoring. The model has random
weights, and so few of them that attention takes most of the time.

Prints a JSON line; --write appends it to perf/results/bench_sparse_steps.jsonl.

    python perf/bench_sparse_steps.py --batch 4 --length 8192 --budget 819 --write
"""

from __future__ import annotations

import json
import random
from typing import Any

from bench_decode import DecodeLamina
from bench_spill import TURN_STEPS, alternate
from common import parser_of, record
from reference_model import made

SHAPE = {"head_dim": 128, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
FORMS = "none", "evict", "select"


def steps_of(
    batch: int, length: int, turns: int, options: dict[str, Any], forms: list[str], layers: int, heads: int
) -> dict[str, Any]:
    """Measures steps of ``batch`` prompts of ``length`` tokens, by form.

    ``heads``: that have K and V; four times as many have Q.
    """
    shape = {**SHAPE, "num_hidden_layers": layers, "num_key_value_heads": heads, "num_attention_heads": 4 * heads}
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 1000) for _ in range(length)] for _ in range(batch)]
    tokens = (turns + 4) * (TURN_STEPS + 1)
    token = 2 * 2 * heads * shape["head_dim"]  # bytes in one layer
    room = 3 * batch * (length + 2 * tokens) * token * layers // 2
    sparse = {name: {"kv_sparsity": name, **options} for name in forms if name != "none"}
    with made("bfloat16", shape, 2 * length) as path:
        players = dict[str, DecodeLamina]()
        try:
            for name in forms:
                players[name] = DecodeLamina(
                    path, prompts, tokens, dtype="bfloat16", transport="shm", memory_workers=1,
                    kv_memory=str(room), enable_prefix_caching=False, **sparse.get(name, {}),
                )  # fmt: skip
            before = {name: counted(player) for name, player in players.items()}
            line = alternate(players, turns)
            after = {name: counted(player) for name, player in players.items()}
            spent = {x: {name: after[x][name] - before[x][name] for name in after[x]} for x in players}

            def of_a_step(what: str, unit: float, digits: int) -> dict[str, float]:
                """Returns the time of a row of each sequence: while one waits for its scores, the others
                have theirs.
                """
                return {x: round(each[what] / each["rows"] * batch / unit, digits) for x, each in spent.items()}

            medians = {name: each["median"] for name, each in line["step_s"].items()}
            return {
                **line,
                "tokens_per_s": {name: round(batch / each, 1) for name, each in medians.items()},
                "of_all_kv": {name: round(each / medians[forms[0]], 3) for name, each in medians.items()},
                "kv_mb_of_a_step": of_a_step("stored_bytes", 1e6, 1),
                "of_budget_bytes": of_budget_bytes(spent, layers, token, **options) if "none" in players else {},
                "attend_ms_of_a_step": of_a_step("attend_s", 1e-3, 3),
                "score_ms_of_a_step": of_a_step("score_s", 1e-3, 4),
                "prompts_s": {name: round(player.prompts_s, 2) for name, player in players.items()},
                "score_s_of_prompts": {name: round(before[name]["score_s"], 4) for name in players},
            }
        finally:
            for player in players.values():
                player.close()


def of_budget_bytes(
    spent: dict[str, dict[str, float]], layers: int, token: int, *, kv_budget: int, kv_full_layers: int
) -> dict[str, list[float]]:
    """Returns what a row reads, as a share of all KV in the full layers and the budget in the others; and of these
    alone. ``token``: bytes in one layer.
    """
    each = {name: x["stored_bytes"] / x["rows"] for name, x in spent.items()}
    whole, least = each["none"] * kv_full_layers / layers, (layers - kv_full_layers) * kv_budget * token
    shares = {name: (x / (whole + least), (x - whole) / least) for name, x in each.items() if name != "none"}
    return {name: [round(share, 3) for share in both] for name, both in shares.items()}


def counted(player: DecodeLamina) -> dict[str, float]:
    """Returns what the memory workers have read and spent so far, and the rows that they had."""
    memory = [counters for name, counters in player.llm.stats().items() if name.startswith("memory")]
    return {name: sum(each[name] for each in memory) for name in ("stored_bytes", "attend_s", "score_s", "rows")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each prompt")
    parser.add_argument("--budget", type=int, default=819, help="--kv-budget")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--full-layers", type=int, default=1, help="of these, those that keep all")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument(
        "--forms", nargs="+", default=list(FORMS), choices=FORMS, help="the first is the reference of the others"
    )
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "write"}
    options = {"kv_budget": args.budget, "kv_full_layers": args.full_layers}
    line = steps_of(args.batch, args.length, args.turns, options, args.forms, args.layers, args.kv_heads)
    record("bench_sparse_steps", settings, line, write=args.write)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
