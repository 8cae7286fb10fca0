"""The contract of lamina.ops.sampling.Backend: every implementation and instruction set draws the same token, and the
right one by a reference in fp64 that shares no code with them.

Covers: lamina/ops/sampling/native.py, lamina/ops/sampling/torch_sampling.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.ops.sampling import Backend, SampleSpec
from lamina.ops.sampling import torch_sampling as plain_module
from lamina.ops.sampling.sampling_settings import LOWEST, sampler_settings
from lamina.ops.sampling.torch_sampling import TorchSampling, random_bits

pytestmark = pytest.mark.no_retry

native = pytest.importorskip("lamina.ops.sampling._sampling", reason="lamina.ops.sampling._sampling was not built")

ENTRIES = ["plain", *native.usable()]
VLLM, TRANSFORMERS = ("min_p", "top_k", "top_p"), ("top_k", "top_p", "min_p")
ORDERS = [VLLM, TRANSFORMERS, ("top_p", "top_k", "min_p"), ("top_p", "min_p", "top_k")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def open_entry(name: str, threads: int = 1) -> Backend:
    from lamina.ops.sampling.native import NativeSampling

    return TorchSampling() if name == "plain" else NativeSampling(threads, name)


BACKENDS = {name: open_entry(name) for name in ENTRIES}


def ask(row: int = 0, index: int = 0, *, seed: int = 7, **options: Any) -> SampleSpec:
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "order": VLLM, **options}
    return SampleSpec(row, sampler_settings(**fields), seed, index)


def kept(row: list[float], order: tuple[str, ...], temperature: float, **limits: float) -> tuple[list[int], bool]:
    """The ids that the filters keep, by rank, and whether rounding might keep others."""
    weights = [math.exp((x - max(row)) / temperature) for x in row]
    ids, close = sorted(range(len(row)), key=lambda i: (-row[i], i)), False
    for name in order:
        limit = limits[name]
        if name == "top_k" and limit:
            ids = ids[: int(limit)]
        elif name == "min_p" and limit:
            close |= any(abs(weights[i] / limit - 1.0) < 1e-5 for i in ids)
            ids = [i for i in ids if weights[i] >= limit] or ids[:1]
        elif name == "top_p" and limit < 1.0:
            total, ends = math.fsum(weights[i] for i in ids), np.cumsum([weights[i] for i in ids])
            close |= bool((abs(ends / (limit * total) - 1.0) < 1e-5).any())
            ids = ids[: int((ends < limit * total).sum()) + 1]
    return ids, close


def reference(row: list[float], u: float, order: tuple[str, ...], temperature: float, **limits: float) -> int | None:
    """The token of a draw; None where rounding decides."""
    ids, close = kept(row, order, temperature, **limits)
    ids = sorted(ids)
    ends = np.cumsum([math.exp((row[i] - max(row)) / temperature) for i in ids])
    at = int((ends <= u * ends[-1]).sum())
    close |= bool((abs(ends - u * ends[-1]) < 1e-5 * ends[-1]).any())
    return None if close and len(ids) > 1 else ids[min(at, len(ids) - 1)]


@st.composite
def rows_of_logits(draw: Any) -> Tensor:
    size = draw(st.sampled_from([1, 2, 7, 64, 65, 200, 1023, 1024, 1025, 2500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    logits = torch.randn(draw(st.integers(1, 3)), size, generator=generator) * draw(
        st.sampled_from([0.0, 0.1, 3.0, 30.0])
    )
    if draw(st.booleans()):
        logits = (logits * 4).round() / 4  # many are equal
    if draw(st.booleans()) and size > 2:
        logits[:, torch.randint(1, size, (size // 3,), generator=generator)] = float("-inf")
    logits[:, size // 2] = -0.0
    return logits.to(draw(st.sampled_from(DTYPES)))


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.3, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 3, 50, 700, 100_000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        "order": st.sampled_from(ORDERS),
    }
)


@settings(max_examples=80, deadline=None)
@given(logits=rows_of_logits(), options=parameters, seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**64 - 1))
def test_all_draw_the_token_of_the_reference(logits: Tensor, options: dict[str, Any], seed: int, index: int) -> None:
    asks = [ask(i, index, seed=seed, **options) for i in range(len(logits))]
    found = {name: backend.sample(logits, asks) for name, backend in BACKENDS.items()}
    assert len(set(map(tuple, found.values()))) == 1, found
    u = random_bits(seed, index) / 2**53
    for row, token in zip(logits.double().tolist(), found["plain"], strict=True):
        assert reference(row, u, **options) in (token, None)


def bits_of(allowed: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(allowed.numpy(), bitorder="little"))


@settings(max_examples=80, deadline=None)
@given(logits=rows_of_logits(), options=parameters, index=st.integers(0, 2**64 - 1),
       share=st.sampled_from([0.0, 0.01, 0.5, 0.95, 1.0]), blocks=st.integers(0, 3))  # fmt: skip
def test_tokens_that_are_not_allowed_count_as_minus_infinity(
    logits: Tensor, options: dict[str, Any], index: int, share: float, blocks: int
) -> None:
    rows, size = logits.shape
    allowed = torch.rand(rows, 1024 * blocks, generator=torch.Generator().manual_seed(size)) < share
    forbidden = ~torch.nn.functional.pad(allowed, (0, size))[:, :size]
    before = logits.clone()
    for options_ in (options, {"temperature": 0.0}):
        asks = [ask(i, index, **options_) for i in range(rows)]
        some = [one._replace(allowed=bits_of(row)) for one, row in zip(asks, allowed, strict=True)]
        wanted = TorchSampling().sample(logits.masked_fill(forbidden, float("-inf")), asks)
        for name, backend in BACKENDS.items():
            assert backend.sample(logits, [*some, *asks]) == [*wanted, *backend.sample(logits, asks)], name
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_number_that_is_none_does_no_harm_where_it_is_not_allowed(name: str) -> None:
    logits = torch.tensor([[1.0, float("nan"), 3.0, 2.0]])
    allowed = torch.zeros(1024, dtype=torch.bool)
    for ids, token in (([0, 3], 3), ([0, 1], -1), ([], -1), ([700], -1)):
        allowed[:], allowed[ids] = False, True
        asks = [ask(0, temperature=0.0)._replace(allowed=bits_of(allowed))]
        assert BACKENDS[name].sample(logits, asks) == [token]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-3, 1e30, 1e308])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 1e-300}])
def test_any_temperature_gives_a_token_that_can_be_drawn(temperature: float, options: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, float("-inf"), 1.5, -3e38, 1.5, float("-inf")]])
    asks = [ask(0, i, temperature=temperature, **options) for i in range(40)]
    found = [backend.sample(logits, asks) for backend in BACKENDS.values()]
    assert all(tokens == found[0] for tokens in found)
    assert set(found[0]) <= {0, 2, 3, 4}
    if temperature < 1e-2:
        assert set(found[0]) <= {2, 4}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@settings(max_examples=40, deadline=None)
@given(logits=rows_of_logits(), options=parameters, index=st.integers(0, 1000))
def test_a_gpu_draws_the_same_token(logits: Tensor, options: dict[str, Any], index: int) -> None:
    asks = [ask(i, index, **options) for i in range(len(logits))]
    assert TorchSampling().sample(logits.cuda(), asks) == TorchSampling().sample(logits, asks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ENTRIES)
def test_neither_mates_nor_threads_change_a_token(name: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 40_000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    choices = [{}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.02}, {"temperature": 0.0}, {"top_k": 3000}]
    asks = [ask(i, i, seed=i, **choices[i % len(choices)]) for i in range(9)]
    together = open_entry(name, threads=3).sample(logits, asks)
    alone = [BACKENDS[name].sample(logits[i : i + 1], [asks[i]._replace(row=0)])[0] for i in range(9)]
    assert together == alone
    apart = torch.full((9, 2, 40_000), 99.0, dtype=dtype)
    apart[:, 1] = logits
    assert BACKENDS[name].sample(apart[:, 1], asks) == together, "rows need not lie one behind the other"


@pytest.mark.parametrize("name", ENTRIES)
def test_greedy_takes_the_lowest_id_and_no_number_gives_none(name: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [1.0, nan, 3.0], [1.0, inf, 3.0], [-inf, -inf, -inf], [-nan, 1.0, 2.0]]
    for options in ({"temperature": 0.0}, {}, {"top_k": 1, "top_p": 0.5}, {"top_p": 0.5, "min_p": 1.0}):
        found = BACKENDS[name].sample(torch.tensor(rows), [ask(i, 0, **options) for i in range(6)])
        assert found[2:] == [-1] * 4
        if options.get("temperature") == 0.0 or options.get("top_k") == 1:
            assert found[:2] == [1, 0]


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("size", [4, 5000])
def test_top_p_ends_at_the_token_that_reaches_it(name: str, size: int) -> None:
    """There are four equal tokens; 2^-52 above one half is beyond two of them."""
    logits = torch.full((1, size), float("-inf"))
    ids = [0, 1, 2, 3] if size == 4 else [5, 1023, 1024, 4999]
    logits[0, ids] = 1.5
    for top_p, count in ((0.5, 2), (0.5 + 2.0**-52, 3), (0.25, 1), (1e-300, 1), (1.0 - 2.0**-53, 4)):
        drawn = BACKENDS[name].sample(logits, [ask(0, i, top_p=top_p) for i in range(60)])
        assert sorted(set(drawn)) == ids[:count]


@pytest.mark.parametrize("name", ENTRIES)
def test_equals_behind_the_edge_are_left_out_of_later_blocks_too(name: str) -> None:
    logits = torch.full((1, 5000), float("-inf"))
    logits[0, [0, 1030, 1040]] = 1.5
    logits[0, 1050] = 2.0
    for dtype in DTYPES:
        drawn = BACKENDS[name].sample(logits.to(dtype), [ask(0, i, top_p=0.5) for i in range(60)])
        assert set(drawn) == {0, 1050}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_ranks_are_the_largest_and_the_lowest_of_equals(name: str, dtype: torch.dtype) -> None:
    logits = ((torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * 8).round() / 4).to(dtype)
    logits[1, 4000:] = float("-inf")
    logits[2, [7, 3]] = float("nan")
    for count in (1, 30, 700, 5000):
        found = BACKENDS[name].top_tokens(logits, count).tolist()
        for row, ids in zip(logits.tolist(), found, strict=True):
            assert ids == sorted(range(5000), key=lambda i: (not math.isnan(row[i]), -row[i], i))[:count]


def test_masses_are_powers_of_two_and_equal_to_the_last_bit() -> None:
    generator = np.random.default_rng(0)
    levels = np.concatenate(
        [np.arange(0, -70_000, -1), generator.integers(LOWEST, 0, 190_000), np.arange(LOWEST, LOWEST + 2100)]
    )
    levels = levels[: len(levels) // 1024 * 1024]
    wanted = plain_module.masses(torch.tensor(levels, dtype=torch.int32))
    exact = 2.0 ** (40 + levels / 2**24)
    assert wanted[0] == 1 << 40
    assert (np.abs(wanted.numpy() - exact) <= 0.5 + 3e-7 * exact).all()
    # As logits: the best is 0, and 2^-24 of a logit is a level; fp32 has 24 bits of those.
    logits = torch.tensor(levels * 2.0**-24, dtype=torch.float32)
    rounded = plain_module.masses(plain_module.levels(torch.cat([logits, torch.zeros(1)])[None], float(2**24))[0, :-1])
    for name in native.usable():
        engine = native.Engine(1, name)
        assert engine.masses(logits.data_ptr(), 0, len(levels), 0.0, float(2**24), LOWEST) == rounded.tolist()


def test_random_bits_are_numpys_philox() -> None:
    for seed, index in ((0, 0), (1, 2), (2**63 - 1, 5), (3, 2**64 - 1), (2**62 + 12345, 99)):
        u = np.random.Generator(np.random.Philox(key=seed, counter=index)).random()
        assert native.random_bits(seed, index) == random_bits(seed, index) == u * 2**53


def frequencies(name: str, logits: Tensor, count: int, **options: Any) -> Tensor:
    """Returns the frequencies of ``count`` draws, in rounds of rows that differ in nothing but the index."""
    asks = [ask(0, i, seed=11, **options) for i in range(count)]
    return torch.bincount(torch.tensor(BACKENDS[name].sample(logits[None], asks)), minlength=len(logits)).double()


def chi_square(found: Tensor, probabilities: Tensor) -> float:
    """In standard deviations of its own distribution, by Wilson and Hilferty."""
    wanted = probabilities * found.sum()
    inside = wanted > 0
    assert not found[~inside].any()
    value, freedom = float(((found - wanted) ** 2 / wanted)[inside].sum()), int(inside.sum()) - 1
    return ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.03, 0.01], dtype=torch.float64)
# (order, filters) -> ids that are left, by the definitions of vLLM and of transformers.
FILTERED = [
    (VLLM, {}, [0, 1, 2, 3, 4, 5]),
    (VLLM, {"top_k": 3}, [0, 1, 2]),
    (VLLM, {"top_p": 0.8}, [0, 1, 2]),
    (VLLM, {"min_p": 0.1}, [0, 1, 2, 3]),
    (VLLM, {"top_p": 0.8, "min_p": 0.2}, [0, 1]),  # top_p 0.8 of (.5, .25, .15): .72 <= .75
    (TRANSFORMERS, {"top_p": 0.8, "min_p": 0.2}, [0, 1, 2]),  # top_p 0.8 of all: .75 < .8 <= .9
    (VLLM, {"top_k": 3, "top_p": 0.8}, [0, 1]),
    (TRANSFORMERS, {"top_k": 3, "top_p": 0.8}, [0, 1]),
    (("top_p", "top_k", "min_p"), {"top_k": 3, "top_p": 0.8}, [0, 1, 2]),
]


@pytest.mark.long(but=["quickest-order0-options0-left0"])
@pytest.mark.parametrize(("order", "options", "left"), FILTERED)
@pytest.mark.parametrize("name", [native.usable()[0]], ids=["quickest"])
def test_draws_have_no_bias(name: str, order: tuple[str, ...], options: dict[str, Any], left: list[int]) -> None:
    """10^5 draws of fixed seeds; the control is a distribution whose best token is 5 % off."""
    wanted = torch.zeros_like(PROBABILITIES)
    wanted[left] = PROBABILITIES[left]
    wanted /= wanted.sum()
    found = frequencies(name, PROBABILITIES.log().float(), 100_000, order=order, **options)
    assert abs(chi_square(found, wanted)) < 3.5
    wanted[0] *= 1.05
    assert chi_square(found, wanted / wanted.sum()) > 3.5, "the control"


@pytest.mark.long
def test_draws_of_torch_have_no_bias() -> None:
    order, options, left = FILTERED[5]
    test_draws_have_no_bias("plain", order, options, left)


def test_a_wide_vocabulary_has_no_bias_either() -> None:
    """Every bit of the place counts there: 4096 tokens, of which the walk passes blocks."""
    name = native.usable()[0]
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    found = frequencies(name, logits, 100_000, temperature=0.8)
    wanted = torch.softmax(logits.double() / 0.8, -1)
    assert abs(chi_square(found, wanted)) < 3.5
    assert chi_square(found, torch.softmax(logits.double() / 0.85, -1)) > 3.5, "the control"


def test_the_order_of_transformers_is_that_of_its_warpers() -> None:
    from transformers.generation import logits_process as warpers

    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    options = {"temperature": 1.3, "top_k": 12, "top_p": 0.85, "min_p": 0.25}
    found = frequencies(native.usable()[0], logits, 20_000, order=TRANSFORMERS, **options)
    scores = logits[None] / 1.3
    for warper in (warpers.TopKLogitsWarper(12), warpers.TopPLogitsWarper(0.85), warpers.MinPLogitsWarper(0.25)):
        scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)
    assert abs(chi_square(found, torch.softmax(scores[0].double(), -1))) < 3.5
    other = frequencies(native.usable()[0], logits, 20_000, order=VLLM, **options)
    assert (other > 0).sum() < (found > 0).sum(), "the control: min_p first leaves less"


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"min_p": 1.5}, "min_p"),
     ({"top_k": -1}, "top_k"), ({"temperature": math.nan}, "temperature"),
     ({"order": ("top_k", "top_p")}, "order of filters")],
)  # fmt: skip
def test_parameters_out_of_range_are_named(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(**bad)


def test_the_native_module_checks_what_it_is_given() -> None:
    from lamina.ops.sampling.native import NativeSampling

    for threads in (0, 2000):
        with pytest.raises(ValueError, match="threads must lie in"):
            NativeSampling(threads)
    with pytest.raises(ValueError, match="this CPU has no abacus"):
        NativeSampling(1, "abacus")
    with pytest.raises(ValueError, match="the draw of row 3 of 2"):
        NativeSampling(1).sample(torch.zeros(2, 5), [ask(3)])
    with pytest.raises(ValueError, match="the draw of row 0 of 2 has a field out of range"):
        NativeSampling(1).sample(torch.zeros(2, 5), [ask(0)._replace(allowed=torch.zeros(1, dtype=torch.uint8))])
    engine = native.Engine(1, "")
    with pytest.raises(ValueError, match="no whole number of draws"):
        engine.draw(torch.zeros(5).data_ptr(), 0, 1, 5, 5, b"123")
    with pytest.raises(ValueError, match="type 7"):
        engine.draw(torch.zeros(5).data_ptr(), 7, 1, 5, 5, b"")
    with pytest.raises(ValueError, match="1 to 4194304 tokens"):
        engine.draw(torch.zeros(5).data_ptr(), 0, 1, 1 << 23, 1 << 23, b"")
