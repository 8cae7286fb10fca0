"""The KV of a sequence by tier of layers, and the split of memory between tiers. Modelled: sums only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from lamina.config.flag_groups import flag_text
from lamina.config.sparsity import SparsityOptions
from lamina.facts.report import size_text, table
from lamina.kv.stored_format import head_bytes
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.capacity import partition_of
from lamina.protocol.kv_placement import FIRST_LOCATION
from lamina.protocol.sparse_layers import max_kept_tokens, sparse_layers
from lamina.protocol.step_plan import LayerShape
from lamina.scheduler.kv_manager.allocator import KvAllocator
from lamina.workers.compute.kv_capacity import split_blocks


class LayerTier(NamedTuple):
    """Layers with the same KV per sequence. Tokens of one sequence: just after blocks were dropped, and before the next
    drop.
    """

    name: str
    layers: int
    kept: int
    most: int
    token_bytes: int  # in all of these layers


@dataclass(frozen=True)
class KVTiers:
    """The KV tiers of one sequence of ``length`` tokens."""

    length: int
    budget: int
    tiers: list[LayerTier]

    @property
    def gain(self) -> float:
        """The factor by which the KV of a sequence shrinks once it has dropped blocks."""
        return self._whole / sum(t.kept * t.token_bytes for t in self.tiers)

    @property
    def least_gain(self) -> float:
        """The factor at the KV's largest size, just before the next drop."""
        return self._whole / sum(t.most * t.token_bytes for t in self.tiers)

    @property
    def _whole(self) -> int:
        """Bytes of a sequence that drops nothing."""
        return sum((self.length if t.name == SPARSE else t.kept) * t.token_bytes for t in self.tiers)

    @property
    def facts(self) -> dict[str, Any]:
        """The tiers as plain data."""
        tiers = [t._asdict() for t in self.tiers]
        return {"kv_tiers": {"length": self.length, "tiers": tiers, "gain": self.gain, "least_gain": self.least_gain}}

    @property
    def lines(self) -> list[str]:
        """The tiers as lines of text."""
        kept = sum(t.kept * t.token_bytes for t in self.tiers)
        head = (
            f"KV by tier of layers, modelled: a sequence of {self.length} tokens, {flag_text('kv_budget', self.budget)}"
        )
        rows = [["tier", "layers", "tokens kept", "bytes", ""]]
        rows += [[t.name, str(t.layers), str(t.kept), size_text(t.kept * t.token_bytes), ""] for t in self.tiers]
        gains = f"{self.gain:.2f} times as many sequences; {self.least_gain:.2f} just before blocks are dropped again"
        return [head, *table(rows), f"  together {size_text(kept)} of {size_text(self._whole)} with all KV: {gains}"]


@dataclass(frozen=True)
class MemorySplit:
    """The split of one memory worker's KV memory."""

    kv_bytes: int
    block_size: int
    blocks: dict[str, tuple[int, int]]  # by tier: KV blocks, and those of one prompt that has dropped none yet
    full: float  # sequences that fit at once without sparsity
    sparse: float  # the same with it, while one of them still has all of its prompt

    @property
    def facts(self) -> dict[str, Any]:
        """The split as plain data."""
        return {"kv_split": asdict(self)}

    @property
    def lines(self) -> list[str]:
        """The split as lines of text."""
        rows = [["tier", "KV blocks", "of a prompt in flight", ""]]
        rows += [[name, str(n), str(prompt), ""] for name, (n, prompt) in self.blocks.items()]
        head = f"{size_text(self.kv_bytes)} of KV memory, in blocks of {self.block_size} tokens"
        room = f"room for {self.sparse:.1f} such sequences, one of which has all of its prompt yet"
        return [head, *table(rows), f"  {room}; {self.full:.1f} with all KV"]


FULL, SPARSE = "full", "sparse"


def tiers_of(layers: Sequence[LayerShape], dtype: torch.dtype, options: SparsityOptions, length: int) -> KVTiers:
    """Return the tiers of a model of ``layers``, stored as ``dtype``. Raises ValueError if no layer can be sparse."""
    windows = _windows(layers)
    tiers = dict[str, LayerTier]()
    for layer, window, sparse in zip(layers, windows, sparse_layers(layers, windows, options), strict=True):
        name = SPARSE if sparse else _dense(window)
        kept = min(length, options.kv_budget if sparse else window or length)
        most = min(length, max_kept_tokens(options)) if sparse else kept
        before = tiers.get(name) or LayerTier(name, 0, kept, most, 0)
        token = layer.kv_heads * head_bytes(layer.qk_dim, layer.v_dim, dtype)
        tiers[name] = before._replace(layers=before.layers + 1, token_bytes=before.token_bytes + token)
    return KVTiers(length, options.kv_budget, list(tiers.values()))


def split_of(
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    options: SparsityOptions,
    length: int,
    kv_bytes: int,
    *,
    block_size: int,
    max_rows: int,
) -> MemorySplit:
    """Return the split of one memory worker that has all layers. Raises ValueError if it cannot hold one sequence."""

    def room(form: SparsityOptions) -> tuple[BlockTables, float]:
        """Return the blocks, all free, and the number of sequences that they hold."""
        partition, most = partition_of("head", layers, [1.0], length), max_kept_tokens(form) if form.drops_blocks else 0
        groups, _, counts = split_blocks(
            layers, partition, 0, dtype, kv_bytes,
            block_size=block_size, max_rows=max_rows, max_len=length, sparsity=form,
        )  # fmt: skip
        blocks = BlockTables([g.window for g in groups], counts, block_size, sparse=[g.sparse for g in groups])
        return blocks, KvAllocator(blocks, max_rows, max_kept_tokens=most).max_sequences(length)

    (sparse, fits), (_, full) = room(options), room(SparsityOptions())
    names = [SPARSE if s else _dense(w) for s, w in zip(sparse.sparse, sparse.windows, strict=True)]
    prompt = KvAllocator(sparse, max_rows).max_blocks(FIRST_LOCATION, length)
    return MemorySplit(
        kv_bytes, block_size, dict(zip(names, zip(sparse.num_blocks, prompt, strict=True), strict=True)), full, fits
    )


def _windows(layers: Sequence[LayerShape]) -> list[int]:
    return [AttentionSpec.decode(layer.spec).window for layer in layers]


def _dense(window: int) -> str:
    return f"window of {window}" if window else FULL
