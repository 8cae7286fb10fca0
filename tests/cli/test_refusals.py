"""Every refusal of options has its one line, which stays as it is (refused.py).

Covers: lamina/cli/common/flags.py.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refused import FILES_REFUSED, FLAGS_REFUSED, MODEL_REFUSED, OPTIONS_REFUSED, PROMISES_REFUSED, SERVER_REFUSED

from lamina import config as option_structs
from lamina.cli.common.preflight import check
from lamina.config import flat_options
from lamina.config.flag_groups import GROUP_OF
from lamina.config.flat_options import make_config
from lamina.config.resolve import ModelLimits, check_model
from lamina.engine.tuning.unloaded_latency import check_slo
from lamina.server import server_config
from lamina.server.server_config import ServerConfig
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedPool

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model")


@pytest.mark.parametrize(("options", "line"), OPTIONS_REFUSED, ids=str)
def test_options_are_refused_where_they_are_made(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_config(options)
    assert str(refused.value) == line


@pytest.mark.parametrize(("options", "line"), MODEL_REFUSED, ids=str)
def test_what_the_model_or_the_host_lacks_is_refused_before_a_start(options: dict[str, Any], line: str) -> None:
    with pytest.raises((ValueError, OSError)) as refused:
        check(MODEL, make_config(options))
    assert str(refused.value).startswith(line) if line.endswith("use ") else str(refused.value) == line


@pytest.mark.parametrize(("options", "line"), SERVER_REFUSED, ids=str)
def test_options_of_a_server_are_refused_where_they_are_made(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refused:
        ServerConfig(**options)
    assert str(refused.value) == line


@pytest.mark.parametrize(("option", "text", "line"), FLAGS_REFUSED, ids=str)
def test_flags_of_several_options_are_refused_where_they_are_read(option: str, text: str, line: str) -> None:
    with pytest.raises(ValueError) as refused:
        GROUP_OF[option].parse(text)
    assert str(refused.value) == line


@pytest.mark.parametrize(("promised", "line"), PROMISES_REFUSED, ids=str)
def test_what_a_request_alone_does_not_keep_is_not_promised(promised: dict[str, Any], line: str) -> None:
    clock = VirtualClock()
    engine, _ = SimulatedPool(1, 64, 16, 64, 4, chunk=16).engine(clock, lambda load: 0.012)
    with pytest.raises(ValueError) as refused:
        check_slo(engine, ServerConfig(**promised).conductor_config.limits, lambda stage, done, total: None, clock)
    assert str(refused.value) == line


def refused_at(ask: Callable[[], object]) -> set[tuple[str, int]]:
    """The files and lines through which a refusal came."""
    with pytest.raises((ValueError, OSError)) as refused:
        ask()
    return {(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(refused.value.__traceback__)}


def test_each_refusal_of_options_is_in_the_table(tmp_path: Path) -> None:
    """A new one is red until its line stands there. Files of options raise nothing else."""
    reached = set[tuple[str, int]]()
    for asked, _ in OPTIONS_REFUSED:
        reached |= refused_at(lambda asked=asked: make_config(asked))
    for asked, _ in MODEL_REFUSED:
        reached |= refused_at(lambda asked=asked: check(MODEL, make_config(asked)))
    windowed = ModelLimits(64, 4, 64, window=16)
    reached |= refused_at(lambda: check_model(make_config({"decode_only": True}), windowed))
    for asked, _ in SERVER_REFUSED:
        reached |= refused_at(lambda asked=asked: ServerConfig(**asked))
    for option, text, _ in FLAGS_REFUSED:
        reached |= refused_at(lambda option=option, text=text: GROUP_OF[option].parse(text))
    for option, text, line in FILES_REFUSED:
        file = tmp_path / "file.yaml"
        file.write_text(text)
        reached |= refused_at(lambda option=option, file=file: GROUP_OF[option].parse(str(file)))
        with pytest.raises(ValueError) as refused:
            GROUP_OF[option].parse(str(file))
        assert str(refused.value) == line.replace("FILE", str(file))
    files = [
        Path(str(flat_options.__file__)),
        Path(str(server_config.__file__)),
        *(f for f in Path(str(option_structs.__file__)).parent.glob("*.py") if f.name != "partition.py"),
    ]
    raises = [(str(f), n) for f in files for n in ast.walk(ast.parse(f.read_text())) if isinstance(n, ast.Raise)]
    lines = {(f, n.lineno): range(n.lineno, (n.end_lineno or n.lineno) + 1) for f, n in raises}
    assert len(lines) > 50
    assert sorted(at for at, within in lines.items() if not reached & {(at[0], n) for n in within}) == []
