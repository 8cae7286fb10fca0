"""Decode attention compiled by numba: one pass over the stored K and V, converted in registers, without copies.

A work item is one sequence's KV head. Loops run over tokens or dimensions of one item only, so an item's result does
not depend on any other. Stores hold float32, or other numbers as integers: bfloat16 as uint16, float16 as int16, fp8 as
uint8; int8 stays int8. Those of 8 bits have scales; the others pass an empty array.

``reassoc`` lets sums be vectorised; NaN and infinities keep their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from .merge import CHUNK_TOKENS

_f32: Any = np.float32
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


def _compiled(fastmath: set[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    decorate: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)
    return decorate


@_intrinsic
def _widen(_context: Any, x: Any) -> Any:
    """Return a stored number as float32."""

    def generate(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        if signature.args[0] == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(value, _INT), ir.Constant(_INT, 16)), _FLOAT)
        if signature.args[0] == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
        if signature.args[0] == types.int8:
            return builder.sitofp(value, _FLOAT)
        if signature.args[0] == types.uint8:  # the bits of E4M3 are those of a float that is 2 ** 120 times smaller
            wide = builder.shl(builder.sext(value, _INT), ir.Constant(_INT, 20))
            small = builder.bitcast(builder.and_(wide, ir.Constant(_INT, 0x87F00000)), _FLOAT)
            return builder.fmul(small, ir.Constant(_FLOAT, 2.0**120))
        return value

    return types.float32(x), generate


@_intrinsic
def _round(_context: Any, x: Any) -> Any:
    """Return the nearest whole number, as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_FLOAT]), args)

    return types.float32(types.float32), generate


@_intrinsic
def _power_of_two(_context: Any, x: Any) -> Any:
    """Return 2 ** x for a whole x in -126 .. 127."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        exponent = builder.add(builder.fptosi(args[0], _INT), ir.Constant(_INT, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(_INT, 23)), _FLOAT)

    return types.float32(types.float32), generate


@_compiled({"contract"})
def exp(x: Any) -> Any:
    """Return exp(x) for x <= 0, to 2 ulp; exp(-87) below that. It vectorises, which math.exp does not. Range reduction
    and minimax polynomial of Cephes' expf (Moshier, Methods and Programs for Mathematical Functions).
    """
    x = _f32(-87.0) if x < _f32(-87.0) else x  # noqa: FURB136 - NaN stays
    k = _round(x * _f32(1.4426950408889634))
    r = (x - k * _f32(0.693359375)) + k * _f32(2.12194440e-4)
    p = _f32(1.9875691500e-4)
    p = p * r + _f32(1.3981999507e-3)
    p = p * r + _f32(8.3334519073e-3)
    p = p * r + _f32(4.1665795894e-2)
    p = p * r + _f32(1.6666665459e-1)
    p = p * r + _f32(5.0000001201e-1)
    return (p * r * r + r + _f32(1.0)) * _power_of_two(k)


@_compiled({"contract", "reassoc"})
def score_block(q: Any, k: Any, block: int, head: int, start: int, stop: int, at: int, score: Any) -> None:
    """Compute score [G, at ..] = q [G, D] . k [block, head, start .. stop]."""
    groups, dim = q.shape
    for token in range(stop - start):
        t = start + token
        for g in range(groups // 4):
            a = b = c = d = _f32(0.0)
            for i in range(dim):
                x = _widen(k[block, head, t, i])
                a += q[4 * g, i] * x
                b += q[4 * g + 1, i] * x
                c += q[4 * g + 2, i] * x
                d += q[4 * g + 3, i] * x
            score[4 * g, at + token], score[4 * g + 1, at + token] = a, b
            score[4 * g + 2, at + token], score[4 * g + 3, at + token] = c, d
        for g in range(groups // 4 * 4, groups):
            a = _f32(0.0)
            for i in range(dim):
                a += q[g, i] * _widen(k[block, head, t, i])
            score[g, at + token] = a


@_compiled({"contract", "reassoc"})
def accumulate_block(score: Any, at: int, v: Any, block: int, head: int, start: int, stop: int, o: Any) -> None:
    """Compute o [G, Dv] += score [G, at ..] . v [block, head, start .. stop], two heads by four tokens at a time."""
    groups, dim = o.shape
    quads = (stop - start) // 4
    for quad in range(quads):
        t, x = start + 4 * quad, at + 4 * quad
        for g in range(groups // 2):
            a, b, c, d = score[2 * g, x], score[2 * g, x + 1], score[2 * g, x + 2], score[2 * g, x + 3]
            e, f, h, j = score[2 * g + 1, x], score[2 * g + 1, x + 1], score[2 * g + 1, x + 2], score[2 * g + 1, x + 3]
            for i in range(dim):
                v0, v1 = _widen(v[block, head, t, i]), _widen(v[block, head, t + 1, i])
                v2, v3 = _widen(v[block, head, t + 2, i]), _widen(v[block, head, t + 3, i])
                o[2 * g, i] += (a * v0 + b * v1) + (c * v2 + d * v3)
                o[2 * g + 1, i] += (e * v0 + f * v1) + (h * v2 + j * v3)
        for g in range(groups // 2 * 2, groups):
            a, b, c, d = score[g, x], score[g, x + 1], score[g, x + 2], score[g, x + 3]
            for i in range(dim):
                v0, v1 = _widen(v[block, head, t, i]), _widen(v[block, head, t + 1, i])
                v2, v3 = _widen(v[block, head, t + 2, i]), _widen(v[block, head, t + 3, i])
                o[g, i] += (a * v0 + b * v1) + (c * v2 + d * v3)
    for token in range(4 * quads, stop - start):
        for g in range(groups):
            a = score[g, at + token]
            for i in range(dim):
                o[g, i] += a * _widen(v[block, head, start + token, i])


@_compiled({"contract", "reassoc"})
def _softmax(score: Any) -> Any:
    """Replace score [n] by weights that add up to 1, and return the log-sum-exp."""
    high = _f32(-np.inf)
    for i in range(len(score)):
        high = score[i] if score[i] > high else high  # noqa: FURB136 - vectorises
    for i in range(len(score)):
        score[i] = exp(score[i] - high)
    total = _f32(0.0)
    for i in range(len(score)):
        total += score[i]
    for i in range(len(score)):
        score[i] /= total
    return high + _f32(math.log(total))


@_compiled({"contract"})
def _multiply(score: Any, at: int, scale: Any, block: int, head: int, start: int, stop: int) -> None:
    """Multiply score [G, at ..] by scale [block, head, start .. stop]; an empty scale is 1."""
    if len(scale):
        for g in range(score.shape[0]):
            for token in range(stop - start):
                score[g, at + token] *= scale[block, head, start + token]


@_compiled({"contract"})
def merge(o: Any, lse: Any, left: int, right: int) -> None:
    """Merge the parts ``left`` and ``right`` of o [parts, G, Dv] and lse [parts, G] into ``left``, as ``merge.merge``
    does.
    """
    for g in range(o.shape[1]):
        a, b = lse[left, g], lse[right, g]
        high = a if a > b else b  # noqa: FURB136
        weight_a, weight_b = exp(a - high), exp(b - high)
        total = weight_a + weight_b
        weight_a, weight_b = weight_a / total, weight_b / total
        lse[left, g] = high + _f32(math.log(total))
        for i in range(o.shape[2]):
            o[left, g, i] = weight_a * o[left, g, i] + weight_b * o[right, g, i]


@_compiled({"contract"})
def merge_to_root(o: Any, lse: Any, chunks: Any, places: Any) -> None:
    """Merge the aligned tree over parts, of the chunks ``chunks`` (ascending, overwritten), into part 0."""
    n = len(chunks)
    for i in range(n):
        places[i] = i
    while n > 1:
        kept, i = 0, 0
        while i < n:
            place, parent = places[i], chunks[i] >> 1
            i += 1
            if i < n and chunks[i] >> 1 == parent:
                merge(o, lse, place, places[i])
                i += 1
            chunks[kept], places[kept] = parent, place
            kept += 1
        n = kept


@_compiled({"contract"})
def attend_stored(
    q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, row: Any, seen: Any, stop_at: Any, first: Any, origin: Any,
    table: Any, slopes: Any, softcap: Any, begin: int, end: int, out: Any, lse_out: Any,
) -> None:  # fmt: skip
    """Attend work items ``begin .. end``, numbered (sequence, KV head): row ``row[s]`` over ``seen[s] .. stop_at[s]``.
    The row is at position ``first[s]``. q [R, Hq, D] scaled, k [N, H, size, D], v [N, H, size, Dv]. Scales [N, H, size]
    or [0, 0, 0], slopes [Hq] or [0], out [R, Hq, Dv], lse_out [R, Hq].
    """
    heads, size = k.shape[1], k.shape[2]
    groups, most = q.shape[1] // heads, table.shape[1] * size // CHUNK_TOKENS
    score = np.empty((groups, CHUNK_TOKENS), np.float32)
    o, lse = np.empty((most, groups, v.shape[3]), np.float32), np.empty((most, groups), np.float32)
    chunks, places = np.empty(most, np.int64), np.empty(most, np.int64)
    for item in range(begin, end):
        s, head = item // heads, item % heads
        q_heads, parts = slice(head * groups, (head + 1) * groups), 0
        for chunk in range(seen[s] // CHUNK_TOKENS, -(-stop_at[s] // CHUNK_TOKENS)):
            start, stop = max(seen[s], chunk * CHUNK_TOKENS), min(stop_at[s], (chunk + 1) * CHUNK_TOKENS)
            t = start
            while t < stop:
                upto = min(stop, t // size * size + size)
                block = table[s, (t - origin[s]) // size]
                score_block(q[row[s], q_heads], k, block, head, t % size, t % size + upto - t, t - start, score)
                _multiply(score, t - start, k_scale, block, head, t % size, t % size + upto - t)
                t = upto
            for g in range(groups):
                weights = score[g, : stop - start]
                if softcap > 0:
                    for i in range(stop - start):
                        weights[i] = softcap * _f32(math.tanh(weights[i] / softcap))
                if len(slopes):
                    for i in range(stop - start):
                        weights[i] += slopes[head * groups + g] * _f32(start + i - first[s])
                lse[parts, g] = _softmax(weights)
            for g in range(groups):
                for i in range(o.shape[2]):
                    o[parts, g, i] = 0.0
            t = start
            while t < stop:
                upto = min(stop, t // size * size + size)
                block = table[s, (t - origin[s]) // size]
                _multiply(score, t - start, v_scale, block, head, t % size, t % size + upto - t)
                accumulate_block(score, t - start, v, block, head, t % size, t % size + upto - t, o[parts])
                t = upto
            chunks[parts] = chunk
            parts += 1
        if parts:
            merge_to_root(o[:parts], lse[:parts], chunks[:parts], places)
        for g in range(groups):  # slices on the left take twice as long to compile
            lse_out[row[s], head * groups + g] = lse[0, g] if parts else -np.inf
            for i in range(o.shape[2]):
                out[row[s], head * groups + g, i] = o[0, g, i] if parts else 0.0


@_compiled({"contract", "reassoc"})
def attend_self(
    q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, rows: Any, scale: Any, softcap: Any, out: Any, lse_out: Any
) -> None:
    """Attend the rows ``rows``, each over itself alone: o is v, lse is the score. q [R, Hq, D] in float32, k [R, H, D],
    v [R, H, Dv] as stored, their scales [R, H] or [0, 0], out [R, Hq, Dv], lse_out [R, Hq].
    """
    groups = q.shape[1] // k.shape[1]
    for r in rows:
        for h in range(q.shape[1]):
            score = _f32(0.0)
            for i in range(q.shape[2]):
                score += scale * q[r, h, i] * _widen(k[r, h // groups, i])
            unit = _f32(1.0)
            if len(k_scale):
                score *= k_scale[r, h // groups]
                unit = v_scale[r, h // groups]
            if softcap > 0:
                score = softcap * _f32(math.tanh(score / softcap))
            lse_out[r, h] = score
            for i in range(v.shape[2]):
                out[r, h, i] = _widen(v[r, h // groups, i]) * unit
