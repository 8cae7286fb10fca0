"""Decode speed of Lamina against transformers' generate, on the same model and the same cores.

All competitors are prefilled first and then take turns of a few steps each, so that noise of the machine hits them
alike. The prompts were read one competitor after the other. Prints one JSON line; --write appends it to
perf/results/bench_decode.jsonl.

    python perf/bench_decode.py --batch 8 --prompt 512 --tokens 64 --dtype bfloat16 --write

With --temperature all of them sample, by the same parameters, and "lamina greedy" takes part too. --quantization adds
Lamina with rounded weights. --peers adds the other engines whose environments perf/peers/install.sh has made. All
output is checked. A token counts as wrong by as much as its logit lies below the best one of the model in fp32, given
the tokens before it (where it is greedy).
"""

from __future__ import annotations

import argparse
import copy
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from common import GREEDY, add_sampling, cpu_pressure, parser_of, record, sampling_of, spread
from peers.decode import PEERS, DecodePeer
from reference_model import FAMILIES, made

from lamina import LLM, SamplingParams
from lamina.ops.recurrence.native import NativeRecurrence
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.request import RequestOutput
from lamina.workers.memory.memory_bandwidth import measure_read_bandwidth

TURN_STEPS = 8
REST_S = 0.01  # before a turn, while idle threads of the one before go on spinning for work
CHECKED = 2  # sequences of each competitor
CHUNK = 512  # of a prompt, in a step of Lamina's
SHAPES: dict[str, dict[str, int]] = {"246m": {}, "1b": {"hidden_size": 2048, "intermediate_size": 8192}}
SUBJECT = "lamina shm"  # whom all are compared with


class DecodePlayer(Protocol):
    """A competitor whose sequences are all prefilled."""

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps."""

    def tokens(self) -> list[list[int]]:
        """Returns the generated tokens, by sequence."""

    def close(self) -> None: ...


class Generate:
    """``model.generate`` on a thread, held between its steps by a logits processor, so that it runs only in its
    turn.
    """

    def __init__(
        self, model: Any, prompts: list[list[int]], tokens: int, cache: str, sampling: dict[str, Any] = GREEDY
    ) -> None:
        self._ids: torch.Tensor = torch.empty(0)
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        ids, self._prompt = torch.tensor(prompts), len(prompts[0])
        options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
        if cache == "static":
            options["disable_compile"] = True  # as transformers itself decides on a CPU
        options |= sampling if (samples := sampling["temperature"] > 0.0) else {}

        def run() -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=samples,
                logits_processor=[self._hold],
                **options,
            )

        threading.Thread(target=run, daemon=True).start()
        self._paused.acquire()  # prefilled

    def _hold(self, ids: Any, scores: Any) -> Any:
        self._ids = ids
        self._paused.release()
        self._go.acquire()
        return scores

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._go.release()
            self._paused.acquire()
            times.append(time.perf_counter() - start)
        return times

    def tokens(self) -> list[list[int]]:
        """Returns the generated tokens, by sequence."""
        tokens: list[list[int]] = self._ids[:, self._prompt :].tolist()
        return tokens

    def close(self) -> None:
        pass  # the thread is a daemon and holds nothing but memory


class DecodeLamina:
    """An LLM whose sequences are all prefilled, stepped by its stream."""

    def __init__(
        self, path: Path, prompts: list[list[int]], tokens: int, sampling: dict[str, Any] = GREEDY, **options: Any
    ) -> None:
        self.batch, rounds = len(prompts), len(prompts) * -(-len(prompts[0]) // CHUNK)
        tokens += rounds  # the first prompt's sequence decodes while the others' are read
        options |= {"max_model_len": len(prompts[0]) + tokens + 8, "max_num_seqs": self.batch, "prefill_chunk": CHUNK}
        self.llm = LLM(str(path), **options)
        self.engine = self.llm.engine
        start = time.perf_counter()
        for seed, prompt in enumerate(prompts):
            self.engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **sampling))
        self._outputs: list[RequestOutput] = []
        self._step()  # the first after which all decode together
        self.prompts_s = time.perf_counter() - start

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step. One step is always in flight. The first of a turn is therefore not counted, and the
        last has its time before the turn is over, which it would take from others.
        """
        self._step()
        times = [self._step() for _ in range(steps)]
        time.sleep(max(times))
        return times

    def _step(self) -> float:
        start = time.perf_counter()
        while len(outputs := self.engine.step()) < self.batch:
            if not self.engine.has_work:
                raise RuntimeError("a sequence ended before the others had begun")
        self._outputs = outputs
        return time.perf_counter() - start

    def tokens(self) -> list[list[int]]:
        """Returns the generated tokens, by sequence."""
        return [list(o.outputs[0].token_ids) for o in sorted(self._outputs, key=lambda o: o.request_id)]

    def close(self) -> None:
        self.llm.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded by each competitor")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-workers", type=int, default=1)
    parser.add_argument("--attention", default="auto", help="backend of the memory workers")
    parser.add_argument("--threads", type=int, default=0, help="of each competitor; 0 = all cores")
    parser.add_argument("--family", default="llama", help="of the model: " + ", ".join(FAMILIES))
    parser.add_argument("--layers", type=int, default=16, help="of a llama")
    add_sampling(parser)
    parser.add_argument(
        "--peers",
        default="",
        help=f"other engines, by comma, or all: {', '.join(PEERS)}; with weights as openvino:int8",
    )
    parser.add_argument(
        "--peer-folder", type=Path, default=Path("build/peers"), help="their environments (peers/install.sh)"
    )
    parser.add_argument(
        "--quantization",
        default="",
        help="further Lamina engines, by comma: int8, int4; with rows of int8 as int4:int8",
    )
    parser.add_argument("--shape", choices=SHAPES, default="246m", help="of a llama")
    parser.add_argument("--without", default="", help="competitors that are not to take part, by comma")
    args = parser.parse_args()
    if SUBJECT in args.without.split(","):
        raise SystemExit(f"--without {SUBJECT}: all others are compared with it; leave it in")
    for name in filter(None, args.peers.split(",") if args.peers != "all" else ()):
        peer, _, form = name.partition(":")
        if peer not in PEERS or form not in ("", "int8", "int4"):
            raise SystemExit(f"--peers {name}: there are {', '.join(PEERS)}, or all; their folder is --peer-folder's")
    sampling = sampling_of(args)
    args.threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads)
    settings = {k: v for k, v in vars(args).items() if k not in ("peer_folder", "write")}
    shape = SHAPES[args.shape] | {"num_hidden_layers": args.layers} if args.family == "llama" else {}
    with made(args.dtype, shape, family=args.family) as path:
        print(record("bench_decode", settings, measure(path, args, sampling), write=args.write))


def measure(path: Path, args: argparse.Namespace, sampling: dict[str, Any]) -> dict[str, Any]:
    """Steps of all competitors in turns; tokens per second and where Lamina's time went."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 32000, (args.batch, args.prompt), generator=generator).tolist()
    threads = {"compute_threads": args.threads, "memory_threads": args.threads}
    common = {
        "attention": args.attention,
        "dtype": args.dtype,
        "memory_workers": args.memory_workers,
        **threads,
    }
    total = args.tokens + 2 * TURN_STEPS + args.tokens // TURN_STEPS
    makers: dict[str, Callable[[], DecodePlayer]] = {
        "transformers static": lambda: Generate(model, prompts, total, "static", sampling),
        "transformers dynamic": lambda: Generate(model, prompts, total, "dynamic", sampling),
        SUBJECT: lambda: DecodeLamina(path, prompts, total, sampling, transport="shm", **common),
        "lamina greedy": lambda: DecodeLamina(path, prompts, total, transport="shm", **common),
        "lamina loopback": lambda: DecodeLamina(path, prompts, total, sampling, transport="loopback", **common),
        "lamina deterministic": lambda: DecodeLamina(
            path, prompts, total, sampling, transport="shm", deterministic=True, **common
        ),
    }
    for form in filter(None, args.quantization.split(",")):
        weights, _, compute = form.partition(":")
        more = {**common, "quantization": weights, "quantization_compute": compute or "auto"}
        makers[f"lamina {form}"] = partial(DecodeLamina, path, prompts, total, sampling, transport="shm", **more)
    if not args.temperature:
        del makers["lamina greedy"]  # all are
    config = model.config
    attention_layers = sum(
        "attention" in kind and "linear" not in kind for kind in getattr(config, "layer_types", None) or ()
    )
    attention_layers = attention_layers or config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * attention_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    settings = {
        "model": str(path),
        "dtype": args.dtype,
        "prompts": prompts,
        "tokens": total,
        "threads": args.threads,
        "sampling": sampling,
        "kv_bytes": kv_bytes * args.batch * (args.prompt + total),
    }
    for name in PEERS if args.peers == "all" else filter(None, args.peers.split(",")):
        makers[name] = partial(DecodePeer, args.peer_folder, name, settings)
    for name in filter(None, args.without.split(",")):
        if not makers.pop(name, None):
            raise SystemExit(f"--without {name}: no competitor has that name; it may be one of {', '.join(makers)}")
    players: dict[str, DecodePlayer] = {}
    missing: dict[str, str] = {}
    try:
        for name, make_player in makers.items():
            try:
                players[name] = make_player()
            except (OSError, RuntimeError) as e:
                if name.partition(":")[0] not in PEERS:
                    raise
                missing[name] = str(e)
        figures = run_rounds(players, args.tokens // TURN_STEPS, args.batch)
        subject: Any = players[SUBJECT]
        figures["floor"] = floor_of(model, subject.llm, args, kv_bytes * args.batch * args.prompt)
        greedy = {name: player for name, player in players.items() if not args.temperature or name == "lamina greedy"}
        notes = {name: player.note() for name, player in players.items() if isinstance(player, DecodePeer)}
        return {**figures, "missing_peers": missing, "notes": notes, "quality": _quality(path, prompts, greedy)}
    finally:
        for player in players.values():
            player.close()


def floor_of(model: Any, llm: LLM, args: argparse.Namespace, kv_bytes: int) -> dict[str, float]:
    """Return the bytes that a step reads at least, and the seconds for that at this machine's rates: weights and KV are
    read, recurrent states copied.
    """
    bind = llm.engine.worker_info.bind
    states = args.batch * sum(RecurrenceSpec.decode(mixer.spec).state_bytes for mixer in bind.mixers) if bind else 0
    weights = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    weights -= model.get_input_embeddings().weight.nbytes
    read, half = measure_read_bandwidth(torch.device("cpu")), 1 << 26
    engine, room = NativeRecurrence(args.threads).engine, torch.ones(2 * half)
    at, times = room.data_ptr(), list[float]()
    for _ in range(5):
        begun = time.perf_counter()
        engine.copy(at, at + 4 * half, half)
        times.append(time.perf_counter() - begun)
    copied = 8 * half / sorted(times)[2]
    seconds = (weights + kv_bytes) / read + 2 * states / copied
    return {
        "weight_bytes": weights, "kv_bytes": kv_bytes, "state_bytes": states, "read_gb_s": read / 1e9,
        "copy_gb_s": copied / 1e9, "seconds": seconds,
    }  # fmt: skip


def run_rounds(players: dict[str, Any], rounds: int, batch: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in players}
    pressure = []
    split = players[SUBJECT].llm
    of_prompts = split.stats()
    for player in players.values():
        player.turn(2)  # warm
    before = split.stats()
    for _ in range(rounds):
        for name, player in players.items():
            time.sleep(REST_S)
            times[name] += player.turn(TURN_STEPS)
        pressure.append(cpu_pressure())
    medians = {name: spread(t)["median"] for name, t in times.items()}
    shm = medians[SUBJECT]
    names = "loopback", "deterministic", "greedy"
    loopback, deterministic, greedy = (medians.get(f"lamina {name}") for name in names)
    return {
        "step_s": {name: spread(t) for name, t in times.items()},
        "tokens_per_s": {name: batch / m for name, m in medians.items()},
        "speed_of_lamina_shm": {name: m / shm for name, m in medians.items() if not name.startswith("lamina")},
        "faster_than_floats": {name: shm / m for name, m in medians.items() if name.startswith("lamina int")},
        "disaggregation_tax": loopback and shm / loopback - 1.0,
        "cost_of_deterministic": deterministic and deterministic / shm - 1.0,
        "cost_of_sampling": greedy and shm / greedy - 1.0,
        "seconds_by_role": _difference(split.stats(), before),
        "prompt_seconds_by_role": of_prompts,
        "prompts_s": {name: p.prompts_s for name, p in players.items() if not isinstance(p, Generate)},
        "convert_s": split.engine.worker_info.summary["convert_s"],
        "cpu_pressure_avg10": pressure,
    }


@torch.inference_mode()
def _quality(path: Path, prompts: list[list[int]], players: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns how far the tokens of each lie from the model's choice in fp32, given what came before. There are two
    numbers: the share that is the same, and the largest difference of logits as a part of their standard deviation. A
    prompt is read once for all.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    same, gaps = {name: list[torch.Tensor]() for name in players}, {name: list[torch.Tensor]() for name in players}
    generated = {name: player.tokens() for name, player in players.items()}
    for i, prompt in enumerate(prompts[:CHECKED]):
        read = DynamicCache(config=model.config)
        model(torch.tensor([prompt[:-1]]), past_key_values=read, logits_to_keep=1)
        for name, tokens in generated.items():
            ids = torch.tensor(tokens[i])
            after = copy.deepcopy(read)  # a recurrent state cannot be cropped
            logits = model(torch.tensor([prompt[-1:] + tokens[i][:-1]]), past_key_values=after).logits[0]
            chosen = logits.gather(1, ids[:, None])[:, 0]
            gaps[name].append(((logits.amax(1) - chosen) / logits.std(1)).max())
            same[name].append((logits.argmax(1) == ids).float().mean())
    return {
        name: {"same": float(torch.stack(same[name]).mean()), "gap": float(torch.stack(gaps[name]).max())}
        for name in players
    }


def _difference(after: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {w: {k: v - before[w].get(k, 0.0) for k, v in values.items()} for w, values in after.items()}


if __name__ == "__main__":
    main()
