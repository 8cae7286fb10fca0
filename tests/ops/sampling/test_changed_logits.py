"""Penalties, bias and bans on a row of logits, number by number, and the token or error where little is left."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.ops.sampling import sampler
from lamina.ops.sampling.sampler import Sampler, TorchSampling
from lamina.ops.sampling.token_history import LogitChanges, TokenHistories, logit_changes_of
from lamina.protocol.control import ALL_TOKENS_BANNED, NO_TOKEN, LogitsUpdate, Penalties, SamplingRequest

VOCAB = 6
ROW = [2.0, -2.0, 1.0, -1.0, 4.0, 0.5]
PROMPT, DRAWN = [0, 1], [1, 2, 2]
NONE: dict[str, Any] = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "logit_bias": {}, "prompt_token_ids": []}


def draw(*, row: int = 0, temperature: float = 0.0, banned: tuple[int, ...] = (), **more: Any) -> SamplingRequest:
    return SamplingRequest(
        row=row, sequence=3, temperature=temperature, top_k=0, top_p=1.0, seed=more.pop("seed", 0),
        output_index=more.pop("index", 0), logprobs=more.pop("logprobs", -1), banned_token_ids=list(banned), **more,
    )  # fmt: skip


def told(pending: int | None = None, **penalties: Any) -> tuple[SamplingRequest, dict[int, LogitChanges]]:
    """A draw after DRAWN, and what it counts."""
    one = draw(
        logits_update=LogitsUpdate(num_known_tokens=0, tokens=DRAWN, penalties=Penalties(**{**NONE, **penalties}))
    )
    return one, logit_changes_of(TokenHistories().note([], [one]), {} if pending is None else {3: pending})


def changed(*told: Any) -> list[float]:
    row = torch.tensor(ROW)
    sampler.change_logits(row, *told)
    return [float(x) for x in row]


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({}, ROW),
        ({"presence": 0.5}, [2.0, -2.5, 0.5, -1.0, 4.0, 0.5]),
        ({"frequency": 0.5}, [2.0, -2.5, 0.0, -1.0, 4.0, 0.5]),
        ({"presence": 0.5, "frequency": 0.25}, [2.0, -2.75, 0.0, -1.0, 4.0, 0.5]),
        ({"repetition": 2.0, "prompt_token_ids": PROMPT}, [1.0, -4.0, 0.5, -1.0, 4.0, 0.5]),
        (
            {"repetition": 2.0, "prompt_token_ids": PROMPT, "logit_bias": {2: 5.0, 1: 1.0, 0: -3.0}},
            [-2.0, -2.0, 3.0, -1.0, 4.0, 0.5],
        ),
        ({"repetition": 2.0, "prompt_token_ids": PROMPT, "frequency": 0.5}, [1.0, -4.5, -0.5, -1.0, 4.0, 0.5]),
        ({"logit_bias": {2: 5.0, 5: -1.0}}, [2.0, -2.0, 6.0, -1.0, 4.0, -0.5]),
        ({"logit_bias": {2: 5.0}, "presence": -0.5}, [2.0, -1.5, 6.5, -1.0, 4.0, 0.5]),
    ],
)
def test_what_penalties_and_bias_do_to_each_logit(penalties: dict[str, Any], expected: list[float]) -> None:
    assert changed(*told(**penalties)) == expected


def test_a_pending_token_counts_as_one_more() -> None:
    assert changed(*told(4, presence=0.5, frequency=0.25)) == [2.0, -2.75, 0.0, -1.0, 3.25, 0.5]
    assert changed(*told(2, frequency=0.25)) == [2.0, -2.25, 0.25, -1.0, 4.0, 0.5]


def test_bans_come_last() -> None:
    one, seen = told(logit_bias={4: 1.0})
    assert changed(draw(banned=(0, 4), logits_update=one.logits_update), seen) == [
        -torch.inf,
        -2.0,
        1.0,
        -1.0,
        -torch.inf,
        0.5,
    ]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_ban_of_no_token_is_named(token: int) -> None:
    changed(draw(banned=(0, VOCAB - 1)), {})
    with pytest.raises(ValueError) as refused:
        changed(draw(banned=(0, token)), {})
    assert str(refused.value) == f"a draw of sequence 3 bans a token beyond the {VOCAB} that there are"


def test_a_penalty_of_no_token_is_named() -> None:
    changed(*told(logit_bias={VOCAB - 1: 1.0}))
    for pending, penalties in ((None, {"logit_bias": {VOCAB: 1.0}}), (VOCAB, {"presence": 1.0})):
        with pytest.raises(ValueError) as refused:
            changed(*told(pending, **penalties))
        assert str(refused.value) == f"penalties name the token {VOCAB}, there are {VOCAB}"


@pytest.fixture(params=["native", "plain"])
def one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "lamina.ops.sampling.native", None)
    else:
        pytest.importorskip("lamina.ops.sampling.native")
    return Sampler(1)


def test_without_the_native_module_torch_draws_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "lamina.ops.sampling.native", None)
    made = Sampler(1)
    assert isinstance(made.backend_for(torch.tensor(ROW)), TorchSampling)
    assert [d.token_id for d in made.sample(torch.tensor([ROW]), [draw()])] == [4]
    assert [r.getMessage().startswith("sampling with torch: import of ") for r in caplog.records] == [True]


def test_threads_are_those_asked_for_or_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    native = pytest.importorskip("lamina.ops.sampling.native")
    monkeypatch.setattr(native, "NativeSampling", asked.append)
    Sampler(3)
    Sampler()
    assert asked == [3, torch.get_num_threads()]


def test_a_known_token_is_reported_whatever_is_banned(one: Sampler) -> None:
    draws = [draw(prompt_logprob_token=1, banned=(0, 4)), draw(prompt_logprob_token=0, banned=(0,))]
    assert [d.token_id for d in one.sample(torch.tensor([ROW] * 2), draws)] == [1, 0]


def test_changed_rows_plain_rows_and_known_tokens_keep_their_order(one: Sampler) -> None:
    first, seen = told(logit_bias={3: 9.0})
    draws = [draw(row=0), first, draw(prompt_logprob_token=1), draw(banned=(4,)), draw(prompt_logprob_token=0), draw()]
    logits = torch.tensor([ROW] * 6)
    before = logits.clone()
    assert [d.token_id for d in one.sample(logits, draws, seen)] == [4, 3, 1, 0, 0, 4]
    assert torch.equal(logits, before), "the caller's logits stay as they are"


def test_log_probabilities_are_of_the_raw_logits(one: Sampler) -> None:
    exact = torch.log_softmax(torch.tensor(ROW), -1).tolist()
    for banned, token in (((), 4), ((4,), 0)):
        (found,) = one.sample(torch.tensor([ROW]), [draw(banned=banned, logprobs=2)])
        assert found.sequence == 3
        assert [(t, rank) for t, _, rank in found.logprobs] == [(token, 1 + (token == 0)), (4, 1), (0, 2)]
        assert [p for _, p, _ in found.logprobs] == pytest.approx([exact[token], exact[4], exact[0]])
    for count, told in ((-1, 0), (0, 1), (VOCAB, VOCAB + 1), (VOCAB + 9, VOCAB + 1)):
        (found,) = one.sample(torch.tensor([ROW]), [draw(logprobs=count)])
        assert len(found.logprobs) == told
    (known,) = one.sample(torch.tensor([ROW]), [draw(prompt_logprob_token=0, logprobs=0)])
    assert known.logprobs == [(0, pytest.approx(exact[0]), 2)]


def test_where_not_all_logits_are_shown_their_sum_is_given(one: Sampler) -> None:
    rows = torch.tensor([ROW, ROW])
    found = one.sample(rows, [draw(logprobs=1), draw(logprobs=1)], lse=torch.tensor([5.0, 7.0]))
    assert [d.logprobs for d in found] == [[(4, -1.0, 1)] * 2, [(4, -3.0, 1)] * 2]


@pytest.mark.parametrize(
    ("row", "banned", "token"),
    [
        (ROW, tuple(range(VOCAB)), ALL_TOKENS_BANNED),
        ([torch.nan, *ROW[1:]], tuple(range(VOCAB)), NO_TOKEN),
        ([torch.inf, *ROW[1:]], (1,), NO_TOKEN),
        ([torch.inf, *ROW[1:]], (0,), 4),
        ([torch.nan, *ROW[1:]], (), NO_TOKEN),
        ([-torch.inf] * VOCAB, (1,), NO_TOKEN),
    ],
)
def test_why_no_token_is_drawn(one: Sampler, row: list[float], banned: tuple[int, ...], token: int) -> None:
    (found,) = one.sample(torch.tensor([row]), [draw(banned=banned, logprobs=2)])
    assert found.token_id == token
    assert bool(found.logprobs) == (token >= 0)


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 1 << 64}, {"index": -1}, {"index": 1 << 64}])
def test_seeds_and_indices_beyond_64_bits_are_named(one: Sampler, bad: dict[str, int]) -> None:
    (name, value), given = next(iter(bad.items())), {"seed": 0, "index": 0}
    one.sample(torch.tensor([ROW]), [draw(**{name: (1 << 64) - 1 if value > 0 else 0})])
    with pytest.raises(ValueError) as refused:
        one.sample(torch.tensor([ROW]), [draw(**bad)])
    given.update(bad)
    words = f"a draw of sequence 3 has the seed {given['seed']} and the index {given['index']}"
    assert str(refused.value) == words


def test_a_draw_depends_on_seed_and_index(one: Sampler) -> None:
    logits = torch.zeros(1, 1000)

    def token(**key: int) -> int:
        return one.sample(logits, [draw(temperature=1.0, **key)])[0].token_id

    assert len({token(seed=s, index=i) for s in range(4) for i in range(4)}) > 12
    assert token(seed=2, index=3) == token(seed=2, index=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_float_dtype_is_taken(one: Sampler, dtype: torch.dtype) -> None:
    logits: Tensor = torch.tensor([ROW], dtype=dtype)
    assert [d.token_id for d in one.sample(logits, [draw()])] == [4]
    assert one.top_tokens(logits, 3).tolist() == [[4, 0, 2]]


def test_the_native_module_draws_what_it_can() -> None:
    native, made = pytest.importorskip("lamina.ops.sampling.native"), Sampler(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert isinstance(made.backend_for(torch.tensor(ROW, dtype=dtype)), native.NativeSampling)
    assert isinstance(made.backend_for(torch.tensor(ROW, dtype=torch.float64)), TorchSampling)
