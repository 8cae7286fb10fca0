"""Facts about a sliced program, for people and tools: the tensors that cross each cut, the order of sends, and the work
of each slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from .capture import size_expression
from .graph import is_expensive, operator_name
from .slices import CutCall, MixerCall, Slice, SlicedProgram

BLOCKS = ("before_q", "between", "after_kv")

_LOOKUPS = {"embedding", "quantized_rows"}


@dataclass(frozen=True)
class Gemm:
    """A product with weights. ``block``, one of BLOCKS, is its place relative to the slice's two sends.
    ``flops_per_token`` counts the work of one row, so with experts it is less than 2 x the number of weights.
    """

    weight: str
    weight_bytes: int
    itemsize: int
    flops_per_token: int
    block: str


@dataclass(frozen=True)
class SliceFacts:
    """The work and messages of a slice. ``q_first``: whether Q leaves before the GEMMs of K and V, None for the last
    slice, which sends nothing; ``why`` explains it.
    """

    index: int
    operators: int
    weight_bytes: int
    gemms: tuple[Gemm, ...]
    q_first: bool | None
    why: str

    def gemm_bytes(self, block: str) -> int:
        """Return the bytes of GEMM weights in one of BLOCKS."""
        return sum(g.weight_bytes for g in self.gemms if g.block == block)


def slice_facts(piece: Slice) -> SliceFacts:
    """Return the facts of one slice, read from its program."""
    nodes = list(piece.module.graph.nodes)
    sends = [n for n in nodes if n.op == "call_method"]
    gemms: list[Gemm] = []
    block = 0
    for node in nodes:
        block = min(block + (node in sends), len(BLOCKS) - 1)
        if is_gemm(node):
            gemms.append(_gemm(node, BLOCKS[block if sends else 0]))
    operators = sum(n.op == "call_function" for n in nodes)
    q_first, why = _q_first(sends) if sends else (None, "the last slice sends nothing")
    return SliceFacts(piece.index, operators, piece.weight_bytes, tuple(gemms), q_first, why)


def send_shares(piece: Slice) -> tuple[float, ...]:
    """Return, for each message of a slice, the share of its GEMM weights' bytes that it waits for."""
    done, shares = 0, list[int]()
    for node in piece.module.graph.nodes:
        if is_gemm(node):
            done += sum(w.meta["val"].numel() * w.meta["val"].itemsize for w in _matrices(node))
        elif node.op == "call_method":
            shares.append(done)
    return tuple(share / done if done else 1.0 for share in shares)


def is_gemm(node: fx.Node) -> bool:
    """Return True if this node multiplies rows with weights."""
    lookup = operator_name(node) in _LOOKUPS
    return node.op == "call_function" and is_expensive(node) and not lookup and bool(_matrices(node))


def _matrices(node: fx.Node) -> list[fx.Node]:
    """Return the operands that are weights of two or more dimensions, directly or through operators that only see
    weights.
    """
    sources: list[fx.Node] = []
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source.op == "get_attr" and isinstance(source.meta.get("val"), Tensor):
            sources += [source] if source.meta["val"].dim() > 1 else []
        elif source.op == "call_function" and _only_weights(source):
            stack += source.all_input_nodes
    return sources


def _only_weights(node: fx.Node) -> bool:
    return all(a.op == "get_attr" or (a.op == "call_function" and _only_weights(a)) for a in node.all_input_nodes)


def _gemm(node: fx.Node, block: str) -> Gemm:
    weights = _matrices(node)
    values = [w.meta["val"] for w in weights]
    left = next(a.meta["val"] for a in node.all_input_nodes if a not in weights and a.meta["val"].dim() > 1)
    out = math.prod(_for_one_row(s) for s in node.meta["val"].shape)
    return Gemm(
        weight=", ".join(str(w.meta["weight"]) for w in weights),
        weight_bytes=sum(v.numel() * v.itemsize for v in values),
        itemsize=values[0].itemsize,
        flops_per_token=2 * out * int(left.shape[-1]),
        block=block,
    )


def _for_one_row(size: Any) -> int:
    expression = size_expression(size)
    return int(size) if expression is None else int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))


def _q_first(sends: list[fx.Node]) -> tuple[bool | None, str]:
    """Return whether Q leaves before the GEMMs of K and V run, and the reason in words; None without attention."""
    if sends[0].target != "q":
        return None, "the slice ends at a mixer, which has no Q"
    sent_q, sent_kv = sends[:2]
    q, k, v = sent_q.args[2], *sent_kv.args[2:]
    q_gemms, kv_gemms = _sources(q), _sources(k) | _sources(v)
    shared = q_gemms & kv_gemms
    if shared:
        names = ", ".join(sorted({_label(n) for n in shared}))
        return False, f"q, k and v come out of one GEMM ({names}) whose parts are not contiguous"
    late = [n for n in kv_gemms if n > sent_q]
    if late:
        return True, "q leaves before " + ", ".join(_label(n) for n in sorted(late))
    if not kv_gemms:
        return False, "k and v need no GEMM of this slice"
    return False, "q is computed from what k and v are computed from: " + ", ".join(sorted(map(_label, kv_gemms)))


def _sources(node: Any) -> set[fx.Node]:
    """Return the nearest GEMMs above a node."""
    sources: set[fx.Node] = set()
    stack, seen = [node], set()
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if is_gemm(source):
            sources.add(source)
        else:
            stack += source.all_input_nodes
    return sources


def _label(node: fx.Node) -> str:
    return str(_matrices(node)[0].meta["weight"])


def message_bytes(calls: Iterable[CutCall]) -> dict[str, Any]:
    """Return the bytes of send Q, send KV and receive O per layer and token; the top level has those of the largest
    layer.
    """
    layers = [
        {"layer": i, "exchange": c.index, "q": c.q_bytes, "kv": c.kv_bytes, "o": c.out_bytes}
        for i, c in enumerate(calls)
    ]
    largest = {k: max(layer[k] for layer in layers) for k in ("q", "kv", "o")}
    return {**largest, "total": sum(largest.values()), "layers": layers}


def mixer_bytes(mixers: Iterable[MixerCall]) -> list[dict[str, Any]]:
    """Return, for each mixer, the bytes per token of its inputs and its output."""
    return [{"exchange": m.index, "name": m.name, "inputs": m.input_bytes, "output": m.out_bytes} for m in mixers]


def to_json(program: SlicedProgram) -> dict[str, Any]:
    """Return all facts as plain data. Sizes are bytes; ``per_token`` ones are of one row."""
    facts = facts_of(program)
    names = dict[int, str]()
    for index, name in [(c.index, c.name) for c in program.calls] + [(m.index, m.name) for m in program.mixers]:
        names[index] = f"{names[index]}, {name}" if index in names else name
    return {
        "num_slices": len(program),
        "num_distinct_slices": len({s.signature for s in program}),
        "stamped": program.stamped > 0,
        "stamped_layers": program.stamped,
        "rows": program.rows,
        "weight_bytes": program.weight_bytes,
        "cut_bytes_per_token": program.cut_bytes_per_token,
        "message_bytes_per_token": program.message_bytes_per_token,
        "messages": message_bytes(program.calls),
        **({"mixers": mixer_bytes(program.mixers)} if program.mixers else {}),
        "cuts": [
            {
                "call": names[cut.index],
                "tensors": [
                    {
                        "name": t.name,
                        "shape": list(t.shape),
                        "dtype": str(t.dtype),
                        "bytes_per_token": t.bytes_per_token,
                    }
                    for t in cut.tensors
                ],
                "bytes_per_token": cut.bytes_per_token,
                "live_bytes_per_token": cut.live_bytes_per_token,
            }
            for cut in program.cuts
        ],
        "slices": [_slice_json(s, f) for s, f in zip(program, facts, strict=True)],
        "timings_s": program.timings,
    }


def _slice_json(piece: Slice, facts: SliceFacts) -> dict[str, Any]:
    total = sum(g.weight_bytes for g in facts.gemms)
    return {
        "index": piece.index,
        "signature": piece.signature,
        "operators": facts.operators,
        "weight_bytes": facts.weight_bytes,
        "q_first": facts.q_first,
        "why": facts.why,
        "gemm_bytes": {b: facts.gemm_bytes(b) for b in BLOCKS},
        "gemm_share": {b: facts.gemm_bytes(b) / total if total else 0.0 for b in BLOCKS},
    }


def facts_of(program: SlicedProgram) -> list[SliceFacts]:
    """Return the facts of every slice. Slices that share a module (stamped ones) are read once."""
    known: dict[int, SliceFacts] = {}
    result = []
    for piece in program:
        if id(piece.module) not in known:
            known[id(piece.module)] = slice_facts(piece)
        facts = known[id(piece.module)]
        result.append(
            SliceFacts(piece.index, facts.operators, piece.weight_bytes, facts.gemms, facts.q_first, facts.why)
        )
    return result
