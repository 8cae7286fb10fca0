"""Slices without a Python call for each operator: what lies between messages and linear layers is compiled beforehand.

Units become machine code by torch's AOTInductor when a worker starts, for any number of rows, so that no step waits for
a compiler; they are kept in the user's cache folder, by all that they depend on. Numbers are rounded less often than by
the operators one by one.
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

log = logging.getLogger(__name__)
SOME_ROWS, MOST_ROWS = 3, 1 << 20

# One thread: waking others takes longer than what there is to do in the few rows of a decode step.
OPTIONS: dict[str, Any] = {"cpp.threads": 1}


def compiled(program: SlicedProgram, tell: Callable[[int, int], None], cache: Path | None = None) -> SlicedProgram:
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
                found.append(_load(_built(unit, folder)))
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


def _built(unit: fx.GraphModule, folder: Path) -> Path:
    """The unit's package in ``folder``, built where it is not there."""
    placeholders = [n for n in unit.graph.nodes if n.op == "placeholder"]
    inputs = tuple(_like(n.meta["val"]) for n in placeholders)
    facts = (unit.code, [(x.shape, x.dtype) for x in inputs], OPTIONS, torch.__version__, _cpu())
    path = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.pt2"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        rows = torch.export.Dim("rows", min=1, max=MOST_ROWS)
        shapes = {"x": tuple({0: rows} if has_rows(n) else None for n in placeholders)}
        with tempfile.TemporaryDirectory(dir=folder) as made, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
            program = torch.export.export(_Given(unit), inputs, dynamic_shapes=shapes)
            package = str(Path(made) / "unit.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=dict(OPTIONS))
            os.replace(package, path)  # others may build the same
    return path


class _Given(torch.nn.Module):
    """A unit with one name for all that it is given."""

    def __init__(self, unit: fx.GraphModule) -> None:
        super().__init__()
        self._unit = unit

    def forward(self, *x: Tensor) -> Any:
        return self._unit(*x)


def _load(path: Path) -> Unit:
    # Its own call would flatten and check what is always the same, which takes five times as long as the unit.
    run: Any = torch._inductor.aoti_load_package(str(path)).loader.run
    # It was built for tensors without gaps, and does not look.
    return lambda *x: run([t if t.is_contiguous() else t.contiguous() for t in x])


def _like(value: Tensor) -> Tensor:
    return torch.zeros([size if isinstance(size, int) else SOME_ROWS for size in value.shape], dtype=value.dtype)


def _cpu() -> str:
    """What code made for this CPU must not be run without."""
    try:
        with open("/proc/cpuinfo") as f:
            return next(line for line in f if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return torch.backends.cpu.get_cpu_capability()


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
