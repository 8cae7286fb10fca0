"""The prompt tokens that a hybrid model computes again, by where states are kept for prompts: the scheduler alone.

They are kept where prompts and turns end, and where a prompt leaves a known one. Here more are kept after every so many
tokens. "pages" is the bound: a model without recurrent layers, whose prompts begin at any token. Loads are chats, and
chats where the last message is edited from any word on. Others are a long document that is edited anywhere before each
prompt, prompts of three out of twelve passages, and chats that keep the last eight turns. Prints one JSON line for
each; --write appends them to perf/results/bench_snapshots.jsonl.

    python perf/bench_snapshots.py --write
"""

from __future__ import annotations

import random
from collections.abc import Callable

from common import parser_of, record

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.feature import Feature
from lamina.scheduler.kv_manager.hybrid_prefix_cache import HybridPrefixCache
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.recurrent_states import RecurrentStates
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.state_ledger import StateLedger

BLOCK, BLOCKS, SEQUENCES, CHUNK, SEED = 16, 8000, 8, 512, 5
MODES = ("pages", "0", "1024", "512", "128")  # tokens between further snapshots; 0: none


class World:
    """Serves one prompt after another, and counts their tokens."""

    def __init__(self, mode: str, slots: int) -> None:
        tables, features = BlockTables([0], [BLOCKS], BLOCK), list[Feature]()
        self.every = 0 if mode == "pages" else int(mode)
        if mode == "pages":
            features = [PrefixCache(tables, BLOCK)]
        else:
            prefixes = HybridPrefixCache(StateLedger([KvShards()], slots), tables, BLOCK)
            features = [prefixes, RecurrentStates(prefixes)]
        self.scheduler = Scheduler(
            tables, max_num_seqs=SEQUENCES, prefill_chunk=CHUNK, num_batches=1, features=features, aligned=False
        )
        self.requests = self.asked = self.computed = 0

    def ask(self, prompt: list[int], outputs: int) -> list[int]:
        """Return the tokens of a prompt and its answer."""
        number, limit = self.requests, len(prompt) + outputs
        params = SamplingParams(max_tokens=outputs)
        sequence = Sequence(number, params, 0, [*prompt], CompletionOutput(0), limit, frozenset())
        self.requests += 1
        self.scheduler.add(sequence)
        for length in range(self.every, len(prompt), self.every) if self.every else ():
            sequence.add_step_end(length)
        rng = random.Random(f"{len(prompt)} {prompt[-3:]}")
        while self.scheduler.running or self.scheduler.waiting:
            for step in self.scheduler.schedule():
                for drawn in step.sampled_sequences:
                    if not drawn.finished:
                        drawn.append(rng.randrange(1000, 30000))
                self.scheduler.on_step_done(step)
        self.asked += len(prompt)
        self.computed += len(prompt) - sequence.num_cached_tokens
        return sequence.tokens


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 30000) for _ in range(count)]


def chats(world: World, rng: random.Random, edits: float = 0.0) -> None:
    """Twelve chats of eight turns. ``edits``: the part of turns that change the message before, in place of a new
    one.
    """
    system = words(rng, 1000)
    for _ in range(12):
        history, last = system, len(system)
        for turn in range(8):
            message = words(rng, 200)
            if turn and rng.random() < edits:
                kept = rng.randrange(200)
                history = world.ask(history[: last + kept] + message[kept:], 30)
            else:
                last = len(history)
                history = world.ask(history + message, 30)


def edited_chats(world: World, rng: random.Random) -> None:
    chats(world, rng, edits=0.3)


def edited_document(world: World, rng: random.Random) -> None:
    system, document = words(rng, 300), words(rng, 8000)
    for _ in range(40):
        at = rng.randrange(len(document))
        document[at : at + 20] = words(rng, 20)
        world.ask(system + document + words(rng, 30), 10)


def passages(world: World, rng: random.Random) -> None:
    system, known = words(rng, 500), [words(rng, 500) for _ in range(12)]
    for _ in range(60):
        world.ask(system + [word for each in rng.sample(known, 3) for word in each] + words(rng, 50), 10)


def last_turns(world: World, rng: random.Random) -> None:
    system, turns = words(rng, 500), list[list[int]]()
    for _ in range(60):
        turns = [*turns, words(rng, 200)][-8:]
        turns[-1] += world.ask(system + [word for each in turns for word in each], 30)[-30:]


LOADS: dict[str, Callable[[World, random.Random], None]] = {
    "chats": chats,
    "edited chats": edited_chats,
    "edited document": edited_document,
    "passages": passages,
    "last turns": last_turns,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--slots", type=int, default=5 * SEQUENCES, help="states that have room")
    args = parser.parse_args()
    for name, load in LOADS.items():
        computed = dict[str, float]()
        for mode in MODES:
            world = World(mode, args.slots)
            load(world, random.Random(SEED))
            computed[mode] = round(world.computed / world.asked, 4)
        settings = {"load": name, "slots": args.slots}
        print(record("bench_snapshots", settings, {"computed_share": computed}, write=args.write))


if __name__ == "__main__":
    main()
