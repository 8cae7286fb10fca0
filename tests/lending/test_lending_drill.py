"""The drill of lending: what it starts, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lending_drill import SCENES, Scene, line_of, main
from lending_fixture import DrillSizes

from lamina.cli.launch import main as launch
from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import GROUP_OF
from lamina.config.flat_options import make_config
from lamina.executor.lending.lender_service import BLOCK_BYTES

SERVED = {"partition": "spill", "transport": "shm"}


@pytest.mark.parametrize(("pool", "loan"), [(640 << 10, 4 << 20), (1 << 30, 7 << 30), (3_000_001, 5_000_001)])
def test_one_server_lends_what_the_other_borrows(pool: int, loan: int, tmp_path: Path) -> None:
    def config(kv_bytes: int, entry: str) -> EngineConfig:
        file = tmp_path / "lending.yaml"
        file.write_text(f"ledger: a:1\n{entry}\n")
        given = GROUP_OF["ledger"].parse(str(file))
        numbers = {name: float(text) for name, text in given.items() if name in ("lend", "borrow_wait_s")}
        return make_config({**SERVED, **given, **numbers, "kv_memory": kv_bytes})

    sizes = DrillSizes(pool, loan)
    lender, debtor = config(*sizes.lending), config(*sizes.borrowing)
    asked = lender.devices.kv_bytes()
    assert lender.topology.lent_bytes(asked) // BLOCK_BYTES >= loan // BLOCK_BYTES == debtor.topology.borrow_bytes >> 20
    assert abs(lender.topology.pool_bytes(asked) - debtor.topology.pool_bytes(debtor.devices.kv_bytes())) < asked / 1e5


def test_the_command_that_was_the_drill_names_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["ledger", "drill", "some/model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "python tests/support/lending_drill.py MODEL" in line


@pytest.mark.parametrize(
    ("flags", "words"), [(["--borrow", "lots"], "--borrow must be a size"), (["--tokens", "3"], "--tokens must be at")]
)
def test_bad_input_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["some/model", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_what_is_wrong_stands_out() -> None:
    assert line_of(Scene("nobody is hit", right=True, what="all is well")).startswith("right  nobody is hit")
    assert line_of(Scene("nobody is hit", right=False, what="", pause_s=2.04)).startswith("WRONG")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_drill_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"
    assert main([str(model), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert [scene["name"] for scene in told["scenes"]] == list(SCENES)
    assert told["left"] == 0
