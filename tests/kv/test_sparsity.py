"""The blocks that a sparse sequence keeps, how they are scored, and which plans are refused.

Covers: lamina/ops/attention/block_scores.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.config.flat_options import make_config
from lamina.config.sparsity import ErrorBudget, parse_error_budget
from lamina.kv.paged_cache import allocate_layer
from lamina.kv.sparsity import BlockScores, KvBudget, choose_dropped
from lamina.ops.attention import Operator
from lamina.ops.attention.block_scores import block_scores
from lamina.ops.attention.native import VARIANTS, NativeAttention
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_tables import BlockTables, PlanError
from lamina.protocol.step_plan import SCORE_BITS, DropBlocks, Fork, Free, New, RowRange, ScoreBlocks, StepPlan, Truncate

SIZE = 16
BUDGET = KvBudget(tokens=8 * SIZE, sink=4, recent=2 * SIZE, block_size=SIZE)


def test_the_best_blocks_stay_and_their_neighbours_count() -> None:
    """The first and the last two of 12 blocks stay in any case, and five of the others."""
    scores = [0, 1, 0, 90, 0, 2, 0, 3, 0, 80, 0, 0]
    assert choose_dropped(scores, [], 12 * SIZE, BUDGET) == [1, 5, 6, 7]
    assert choose_dropped(scores, [5, 6], 12 * SIZE, BUDGET) == [1, 7]
    assert choose_dropped(scores, [], 8 * SIZE, BUDGET) == []


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40), st.integers(0, 15), st.data())
def test_sinks_and_recent_tokens_always_stay(scores: list[int], more: int, data: st.DataObject) -> None:
    length = len(scores) * SIZE - more
    dropped = data.draw(st.lists(st.integers(1, max(1, len(scores) - 4)), unique=True)) if len(scores) > 4 else []
    gone = choose_dropped(scores, dropped, length, BUDGET)
    assert set(gone).isdisjoint(dropped)
    assert gone == sorted(set(gone))
    left = set(range(len(scores))) - set(gone) - set(dropped)
    assert 0 in left or 0 in dropped
    assert all(n in left or n in dropped for n in range(len(scores)) if (n + 1) * SIZE > length - BUDGET.recent)
    kept = len(scores) - len(dropped)
    assert len(left) == min(kept, max(BUDGET.tokens // SIZE, len(left & {0, *range(len(scores) - 3, len(scores))})))


def test_what_is_attended_now_counts_more_than_what_was() -> None:
    """Scores of generated tokens take the place of the prompt's: nothing is frozen on the first choice."""
    scores = BlockScores(num_due=12 * SIZE, observation_window=4)
    scores.add([0, 900, 0, 0, 0, 0, 0, 0, 0, 800, 0, 0])
    scores.num_rows = 1
    first = scores.drop(12 * SIZE, BUDGET)
    assert {1, 9}.isdisjoint(first)
    for _ in range(4):
        scores.add([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 700, 700, 700, 700, 700, 0, 0])
        scores.num_rows = 1
        scores.drop(20 * SIZE, BUDGET)
    assert 1 in scores.dropped_blocks
    assert not {13, 14, 15, 16, 17} & set(scores.dropped_blocks)


def _oracle(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """In fp64: q [R, Hq, D], k [T, H, D] -> [T] sums over rows and heads of their softmax."""
    each = q.shape[1] // k.shape[1]
    score = torch.einsum("rhd,thd->rht", q.double(), k.double().repeat_interleave(each, 1)) * scale
    score.masked_fill_(torch.arange(k.shape[0]) >= seen[:, None, None], float("-inf"))
    return score.softmax(-1).sum((0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_the_mass_of_the_softmax_and_sums_over_heads_do_not_depend_on_who_adds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, rows, heads, each, dim = 150, 5, 4, 2, 32
    store = allocate_layer(12, heads, SIZE, dim, dim, dtype, torch.device("cpu"))
    for tensor in store.tensors:
        tensor.fill_(float("nan"))  # what no block of the sequence holds
    k, q = torch.randn(tokens, heads, dim).to(dtype), torch.randn(rows, heads * each, dim).to(dtype) * 3
    blocks = torch.randperm(12)[: -(-tokens // SIZE)]
    for n in range(tokens):
        store.k[blocks[n // SIZE], :, n % SIZE] = k[n]
    seen = torch.arange(tokens - rows + 1, tokens + 1)

    def operator(kv_heads: int) -> Operator:
        spec = AttentionSpec(scale=0.3)
        return Operator(spec=spec, q_heads=kv_heads * each, kv_heads=kv_heads, qk_dim=dim, v_dim=dim)

    got = block_scores(operator(heads), store, blocks, q, seen)
    want = torch.stack([part.sum() for part in _oracle(q, k, seen, 0.3).split(SIZE)])
    error = (got.double() / (1 << SCORE_BITS) - want).abs().max()
    assert error < 1e-4
    assert abs(int(got.sum()) / (1 << SCORE_BITS) - rows * heads * each) < 1e-3
    wrong = torch.stack([part.sum() for part in _oracle(q, k, seen - 1, 0.3).split(SIZE)])
    assert (got.double() / (1 << SCORE_BITS) - wrong).abs().max() > 100 * error, "a row too few is seen"
    parts = [
        block_scores(
            operator(b - a),
            type(store)(store.k[:, a:b].contiguous(), store.v[:, a:b].contiguous()),
            blocks,
            q[:, a * each : b * each],
            seen,
        )
        for a, b in ((0, 1), (1, 4))
    ]
    assert torch.equal(sum(parts), got)


def test_keys_outside_and_queries_outside_give_a_row_the_same_shares_to_a_millionth() -> None:
    """In fp32: kernels meet a block's keys with all rows, the oracle takes the softmax of one row over all keys."""
    torch.manual_seed(0)
    tokens, rows, dim = 500, 8, 64
    store = allocate_layer(-(-tokens // SIZE), 1, SIZE, dim, dim, torch.float32, torch.device("cpu"))
    k, q = torch.randn(tokens, 1, dim), torch.randn(rows, 1, dim) * 2
    for n in range(tokens):
        store.k[n // SIZE, :, n % SIZE] = k[n]
    op = Operator(spec=AttentionSpec(scale=dim**-0.5), q_heads=1, kv_heads=1, qk_dim=dim, v_dim=dim)
    blocks, seen = torch.arange(-(-tokens // SIZE)), torch.arange(tokens - rows + 1, tokens + 1)
    ways, apart = (
        [block_scores, *(NativeAttention(torch.float32, each).block_scores for each in VARIANTS)],
        list[float](),
    )
    for row in range(rows):
        of = q[row : row + 1], seen[row : row + 1]
        want, less = (
            torch.stack([part.sum() for part in _oracle(of[0], k, upto, op.spec.scale).split(SIZE)])
            for upto in (of[1], of[1] - 1)
        )
        apart.append(float((want - less).abs().max()))
        for scores in ways:
            assert (scores(op, store, blocks, *of).double() / (1 << SCORE_BITS) - want).abs().max() < 1e-6
    assert max(apart) > 1e-4, "a token less makes a difference"


def tables() -> BlockTables:
    made = BlockTables([0, 0], [20, 20], SIZE, sparse=[False, True])
    made.apply(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 10 * SIZE + 3)]))
    return made


def plan(step: int, *ops: object, rows: tuple[RowRange, ...] = ()) -> StepPlan:
    return StepPlan(step=step, ops=list(ops), rows=list(rows))  # type: ignore[arg-type]


def test_dropped_blocks_are_free_in_sparse_groups_alone_and_a_plan_that_comes_twice_drops_once() -> None:
    made = tables()
    before = list(made.block_table(1, 1)[1])
    again = plan(1, DropBlocks(1, [2, 5]), rows=(RowRange(1, 10 * SIZE + 3, 1),))
    for _ in range(2):
        made.apply(again)
        assert made.free_blocks == (9, 11)
        assert list(made.block_table(1, 1)[1]) == [x for n, x in enumerate(before) if n not in (2, 5)]
        assert made.dropped_blocks(1, 1) == (2, 5)
        assert made.dropped_blocks(0, 1) == ()
    made.apply(plan(2, Free(1)))
    assert made.free_blocks == (20, 20)


@pytest.mark.parametrize(
    "ops",
    [
        [DropBlocks(1, [])], [DropBlocks(1, [3, 2])], [DropBlocks(1, [10])], [DropBlocks(1, [11])], [DropBlocks(1,
        [-1])], [DropBlocks(2, [1])], [DropBlocks(1, [1]), DropBlocks(1, [1])], [DropBlocks(1, [1]), Truncate(1, 20)],
        [DropBlocks(1, [1]), Fork(3, 1, 32)], [Fork(3, 1, 32), DropBlocks(1, [1])],
        [ScoreBlocks(1, 2)], [ScoreBlocks(1, 0)], [ScoreBlocks(2, 1)], [ScoreBlocks(1, 1), ScoreBlocks(1, 1)],
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_dropped_or_scored_is_refused_and_changes_nothing(ops: list[object]) -> None:
    made = tables()
    with pytest.raises(PlanError):
        made.apply(plan(1, *ops, rows=(RowRange(1, 10 * SIZE + 3, 1),)))
    assert made.free_blocks == (9, 9)
    made.apply(plan(1, DropBlocks(1, [1]), ScoreBlocks(1, 1), rows=(RowRange(1, 10 * SIZE + 3, 1),)))


def test_a_dropped_block_is_neither_written_nor_dropped_again() -> None:
    made = tables()
    made.apply(plan(1, DropBlocks(1, [8])))
    with pytest.raises(PlanError, match="was dropped"):
        made.apply(plan(2, rows=(RowRange(1, 8 * SIZE, 1),)))
    for again in ([8], [4, 8]):
        with pytest.raises(PlanError):
            made.apply(plan(2, DropBlocks(1, again)))
    assert made.dropped_blocks(1, 1) == (8,)
    assert made.free_blocks == (9, 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_budget": 512}, "--kv-sparsity evict:budget= needs --kv-sparsity evict or --kv-sparsity select"),
        (
            {"kv_sparsity": "evict", "kv_budget": 64},
            "--kv-sparsity evict:budget=64 has no room after sink=4 and recent=64",
        ),
        ({"kv_sparsity": "select", "kv_budget": 64}, "--kv-sparsity select:budget=64 has no room"),
        ({"kv_sparsity": "some"}, "kv.sparsity"),
        ({"kv_observation_window": 8}, "--kv-sparsity evict:window= needs --kv-sparsity evict, because "),
        (
            {"kv_sparsity": "select", "kv_observation_window": 8},
            "--kv-sparsity evict:window= needs --kv-sparsity evict, because only evict chooses blocks",
        ),
        ({"kv_error_budget": "default"}, "--kv-sparsity evict:max-kl= needs --kv-sparsity evict or "),
        ({"kv_sparsity": "evict", "kv_error_budget": "top1"}, "'top1' is none of top1=, kl= and shadow="),
        (
            {"kv_sparsity": "evict", "kv_error_budget": "kl=0.1, top1=1.5"},
            "--kv-sparsity evict:max-top1= must be above 0 and at most 1, not 1.5",
        ),
        ({"kv_sparsity": "evict", "kv_error_budget": "ppl=0.1"}, "'ppl=0.1' is none of"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config({**options, "block_size": SIZE})


def test_an_error_budget_is_read() -> None:
    assert parse_error_budget("") is None
    assert parse_error_budget("default") == ErrorBudget(top1=0.1, kl=0.1, shadow=0.05)
    assert parse_error_budget("shadow=1, kl=0.02") == ErrorBudget(top1=0.1, kl=0.02, shadow=1.0)
