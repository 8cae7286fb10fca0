"""Sampling against distributions computed in fp64, and its independence of batch mates."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.ops.sampling.sampler import Sampler
from lamina.protocol.control import ALL_TOKENS_BANNED, NO_TOKEN, SamplingRequest

sample = Sampler(threads=1).sample


def draw(row: int = 0, **options: object) -> SamplingRequest:
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7, "output_index": 0, "logprobs": -1, **options}
    return SamplingRequest(row=row, sequence=row, **fields)  # type: ignore[arg-type]


def frequencies(logits: torch.Tensor, count: int = 4000, **options: object) -> torch.Tensor:
    drawn = [sample(logits[None], [draw(output_index=i, **options)])[0].token_id for i in range(count)]
    return torch.bincount(torch.tensor(drawn), minlength=logits.numel()).double() / count


def total_variation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().sum() / 2)


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.9])


def test_temperature_draws_from_the_softmax() -> None:
    wanted = torch.softmax(LOGITS.double() / 0.7, -1)
    got = frequencies(LOGITS, temperature=0.7)
    assert total_variation(got, wanted) < 0.03
    assert total_variation(got, torch.softmax(LOGITS.double(), -1)) > 0.05, "the control: temperature matters"


def test_a_draw_beside_another_gets_its_token_and_tells_how_far_apart_they_are() -> None:
    own, other = torch.randn(2, 300, generator=torch.Generator().manual_seed(3)).double()
    other[7] = own[7] = float("-inf")
    rows = torch.stack([LOGITS.new_zeros(300), other.float(), own.float(), other.float()])
    draws = [draw(0), draw(1), draw(2, reference_request=1), draw(3, reference_request=1)]
    drawn = sample(rows, draws)
    p, q = own.softmax(-1), other.softmax(-1)
    kl = float((p * (p / q).log()).nan_to_num(0.0).sum())
    assert drawn[1] == sample(rows, draws[:2])[1], "it knows nothing of who is beside it"
    assert [d.token_id for d in drawn[2:]] == [drawn[1].token_id] * 2
    assert drawn[2].divergence is not None
    assert drawn[2].divergence[0]
    assert abs(drawn[2].divergence[1] - kl) < 1e-5 < kl
    assert drawn[3].divergence == (False, 0.0)


def test_top_k_keeps_the_k_best() -> None:
    got = frequencies(LOGITS, top_k=2)
    wanted = torch.softmax(LOGITS.double().masked_fill(LOGITS < 1.9, float("-inf")), -1)
    assert total_variation(got, wanted) < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.softmax(LOGITS.double(), -1)
    top_two = float(probabilities[0] + probabilities[5])
    assert set(frequencies(LOGITS, 500, top_p=top_two - 1e-6).nonzero()[:, 0].tolist()) == {0, 5}
    assert set(frequencies(LOGITS, 500, top_p=top_two + 1e-3).nonzero()[:, 0].tolist()) == {0, 1, 5}
    assert set(frequencies(LOGITS, 100, top_p=1e-9).nonzero()[:, 0].tolist()) == {0}


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), [draw(temperature=0.0)])[0].token_id == 1


def test_without_a_finite_maximum_no_token_is_drawn() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, nan, 3.0], [1.0, inf, 3.0], [-inf, -inf, -inf], [-inf, 2.0, 1.0]])
    for options in ({"temperature": 0.0, "logprobs": 1}, {}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
        found = sample(rows, [draw(i, **options) for i in range(4)])
        assert [d.token_id for d in found[:3]] == [NO_TOKEN] * 3
        assert [d.logprobs for d in found[:3]] == [[], [], []]
        assert found[3].token_id in (1, 2), "its batch mates do not matter"


def test_a_row_whose_tokens_are_all_banned_is_no_broken_one() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[-inf, 2.0, 1.0], [-inf, 2.0, nan], [-inf, inf, 1.0], [-inf, -inf, -inf], [-inf, 2.0, 1.0]])
    for options in ({"temperature": 0.0, "logprobs": 1}, {}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
        for banned in ([1, 2], [0, 1, 2]):
            draws = [draw(i, banned_token_ids=banned, **options) for i in range(4)]
            found = sample(rows, [*draws, draw(4, **options)])
            assert [d.token_id for d in found[:4]] == [ALL_TOKENS_BANNED, NO_TOKEN, NO_TOKEN, NO_TOKEN]
            assert found[0].logprobs == []
            assert found[4] == sample(rows[4:], [draw(4, **options)])[0], "its batch mates do not matter"


def test_banned_tokens_are_never_drawn() -> None:
    assert sample(LOGITS[None], [draw(temperature=0.0, banned_token_ids=[0, 5])])[0].token_id == 1
    assert frequencies(LOGITS, 200)[0] > 0
    banned = [sample(LOGITS[None], [draw(output_index=i, banned_token_ids=[0])])[0].token_id for i in range(200)]
    assert 0 not in banned


def test_logprobs_are_of_the_raw_distribution() -> None:
    (got,) = sample(LOGITS[None], [draw(temperature=0.3, logprobs=2)])
    wanted = torch.log_softmax(LOGITS.double(), -1)
    assert abs(got.logprobs[0][1] - float(wanted[got.token_id])) < 1e-5
    assert [(t, rank) for t, _, rank in got.logprobs[1:]] == [(0, 1), (5, 2)]


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), vocab=st.integers(2, 50), seed=st.integers(0, 10_000))
def test_a_row_does_not_depend_on_its_mates(rows: int, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    draws = [
        draw(i, temperature=0.8, top_p=0.9, top_k=5, seed=seed + i, output_index=i, logprobs=1) for i in range(rows)
    ]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(rows)]
    assert together == alone
