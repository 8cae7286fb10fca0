"""Slices without a Python call for each operator: what lies between messages is compiled beforehand.

Units become machine code by torch's AOTInductor when a worker starts, for any number of rows, so that no step waits for
a compiler; they are kept in the user's cache folder, by all that they depend on. Their linear layers are those of the
worker's backend, where that has a form for compiled code. Numbers are rounded less often than by the operators one by
one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lamina.converter import SlicedProgram, fuse
from lamina.converter.fuse import Unit, has_rows
from lamina.gemm import Inline, LinearBackend
from lamina.gemm.op import LINEAR_ON
from lamina.models.load import ONE_AT_A_TIME

aten = torch.ops.aten
log = logging.getLogger(__name__)
SOME_ROWS, MOST_ROWS = 3, 1 << 20

# One thread: waking others takes longer than what there is to do in the few rows of a decode step.
OPTIONS: dict[str, Any] = {"cpp.threads": 1}


def compiled(
    program: SlicedProgram, linear: LinearBackend, tell: Callable[[int, int], None], cache: Path | None = None
) -> SlicedProgram:
    """The program with its operators compiled; the one given is used up. ``tell``: how many units of all are done;
    ``cache``: a folder of the user's alone, by default lamina/units in theirs. A unit that cannot be compiled stays.

    Raises ValueError, with what the compiler said, where none can.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamina" / "units"

    def compile_units(units: list[fx.GraphModule]) -> list[Unit]:
        found, errors = list[Unit](), list[Exception]()
        for done, unit in enumerate(units):
            tell(done, len(units))
            try:
                with ONE_AT_A_TIME:
                    package = _built(unit, linear.inline, folder)
                found.append(_load(package, unit, linear))
            except Exception as e:  # noqa: BLE001 - whatever torch.export, inductor and a C++ compiler raise
                found.append(unit)
                errors.append(e)
        tell(len(units), len(units))
        if errors and len(errors) == len(units):
            raise ValueError(f"--compile cannot be used here: {_line(errors[0])}; leave it out") from errors[0]
        if errors:
            log.warning("%d of %d units are not compiled: %s", len(errors), len(units), _line(errors[0]))
        return found

    return fuse(program, compile_units)


def _built(unit: fx.GraphModule, inline: Inline | None, folder: Path) -> Path:
    """The unit's package in ``folder``, built where it is not there. It takes what the unit does, then the backend."""
    given = _inputs(unit)
    inputs = (*(_like(n) for n in given), *([inline.backend] if inline else []))
    options = OPTIONS | ({"aot_inductor.custom_ops_to_c_shims": {LINEAR_ON: [inline.source]}} if inline else {})
    facts = (unit.code, [(x.shape, x.dtype, x.stride()) for x in inputs], options, torch.__version__, _cpu())
    path = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.pt2"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        rows = torch.export.Dim("rows", min=1, max=MOST_ROWS)
        shapes = {"x": (*({0: rows} if has_rows(n) else None for n in given), *([None] if inline else []))}
        with tempfile.TemporaryDirectory(dir=folder) as made, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
            program = torch.export.export(_Given(_on_backend(unit) if inline else unit), inputs, dynamic_shapes=shapes)
            package = str(Path(made) / "unit.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
            os.replace(package, path)  # others may build the same
    return path


class _Given(torch.nn.Module):
    """A unit with one name for all that it is given."""

    def __init__(self, unit: fx.GraphModule) -> None:
        super().__init__()
        self._unit = unit

    def forward(self, *x: Tensor) -> Any:
        return self._unit(*x)


def _on_backend(unit: fx.GraphModule) -> fx.GraphModule:
    """A copy whose linear layers are those of a backend, which it takes last."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(unit.graph, copies)
    with graph.inserting_after(copies[_inputs(unit)[-1]]):
        backend = graph.placeholder("backend")
    for node in list(graph.nodes):
        if node.target is aten.linear.default:
            x, w, b = (*node.args, None)[:3]
            with graph.inserting_before(node):
                flat = graph.call_function(aten.contiguous.default, (x,))  # nothing where it is
            node.target, node.args = LINEAR_ON, (flat, w, b, backend)
    graph.output(result)
    return fx.GraphModule(unit, graph)


def _load(path: Path, unit: fx.GraphModule, linear: LinearBackend) -> Unit:
    # Its own call would flatten and check what is always the same, which takes five times as long as the unit.
    run: Any = torch._inductor.aoti_load_package(str(path)).loader.run
    with_rows = [i for i, n in enumerate(_inputs(unit)) if has_rows(n)]

    def call(*x: Tensor) -> Any:
        given = list(x)
        for i in with_rows:  # it was built for rows without gaps, and does not look
            if not given[i].is_contiguous():
                given[i] = given[i].contiguous()
        if inline := linear.inline:  # the code knows it by address: it lives as long as this call can be made
            given.append(inline.backend)
        return run(given)

    return call


def _inputs(unit: fx.GraphModule) -> list[fx.Node]:
    return [n for n in unit.graph.nodes if n.op == "placeholder"]


def _like(node: fx.Node) -> Tensor:
    """Without gaps, for a tensor of rows; a weight lies as it does."""
    value: Tensor = node.meta["val"]
    if has_rows(node):
        return torch.zeros([size if isinstance(size, int) else SOME_ROWS for size in value.shape], dtype=value.dtype)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _cpu() -> str:
    """What code made for this CPU must not be run without."""
    try:
        with open("/proc/cpuinfo") as f:
            return next(line for line in f if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return torch.backends.cpu.get_cpu_capability()


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
