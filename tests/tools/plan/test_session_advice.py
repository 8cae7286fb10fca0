"""Capacity advice: CachedAttention's arithmetic, its prices, and its read buffer."""

from __future__ import annotations

import pytest

from lamina.cli.launch import main
from lamina.kv.layerwise_load import buffer_bytes
from lamina.tools.plan.model_facts import paper_models
from lamina.tools.plan.session_advice import session_memory, stored_cost

GIB = 1 << 30


def test_section_2_4() -> None:
    """LLaMA-65B: 2.5 MiB a token, 5 GiB a session of 2,048; the paper goes on with 5 GB."""
    token = paper_models()["llama-65b"].kv_bytes_per_token
    assert token == 2.5 * (1 << 20)
    assert session_memory(token, 2048, 1).session == 5 * GIB
    gb = 5e9
    assert round(gb / 26e9 * 1000) == 192, "ms over 16 lanes of PCIe 4"
    filled = gb / 0.360  # bytes a second that a prefill of 360 ms leaves
    assert round(filled / 1e9, 1) == 13.9
    assert round(190e9 / filled) == 14, "s until 190 GB are full"


def test_capacity_of_an_hour() -> None:
    """CCpUT = DSpUT x CCpS; a quarter of it had 98 % of the hits."""
    found = session_memory(1000, 2048, 3600)
    assert found.all == 3600 * found.session == 3600 * 2_048_000
    assert found.advised == found.all / 4


def test_prices_of_the_paper() -> None:
    """128 GB of memory cost a quarter of a GPU at $5, 10 TB of disk a sixth."""
    assert stored_cost(128e9, 0) == pytest.approx(1.1264)
    assert stored_cost(0, 10e12) == pytest.approx(0.82)


@pytest.mark.parametrize(("layers", "buffered"), [(40, 14.4), (16, 5.8)])
def test_the_read_buffer_of_figure_19(layers: int, buffered: float) -> None:
    """1,000 tokens of history take .61 of the time, 100 new ones .39: the paper has 15 of 40 layers; of 16 it is 6."""
    rate = layers / 0.61  # a layer is a byte
    assert buffer_bytes(rate, 0.61, 0.39) == pytest.approx(buffered, abs=0.05)
    assert -(-buffer_bytes(layers / 0.61, 0.61, 0.39) // 1) == {40: 15, 16: 6}[layers]
    assert buffer_bytes(rate, 0.39, 0.61) == 0, "what is computed hides it all"


def test_advise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "advise", "llama-65b", "--context", "2048", "--per-hour", "3600"]) == 0
    text = capsys.readouterr().out
    for said in ("5.4 GB", "19327.4 GB", "4831.8 GB", "$0.40"):
        assert said in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--per-hour", "0"], "--per-hour must be above 0, not 0"),
        ([], "sessions advise needs --per-hour"),
        (["--per-hour", "9"], "--context"),
    ],
)
def test_advice_that_cannot_be(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "advise", "llama-65b", *flags]) == 2
    assert said in capsys.readouterr().err
