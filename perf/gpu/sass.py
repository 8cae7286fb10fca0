"""The instructions that a kernel of csrc/attention/cuda runs for a tile of 16 tokens, counted in its machine code.

nvcc compiles, nvdisasm shows. The count is that of the shortest way around the loop over tiles by which a whole tile of
a store's block is multiplied and the next one is fetched. A warp does that for nearly every tile of a decode step.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lamina.ops.attention.cuda_geometry import Variant
from lamina.ops.attention.cuda_kernels import SOURCES, options

PRODUCT, COPY = "HMMA", "LDGSTS"


class MachineCode(NamedTuple):
    """A kernel's instructions, without their predicates, and for each the indices of those that may be next."""

    names: list[str]
    nexts: list[list[int]]


def tools() -> tuple[str, str]:
    """nvcc and nvdisasm. Raises ImportError, one line, for the one that is missing."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise ImportError("no nvcc: install the CUDA toolkit, or pip install nvidia-cuda-nvcc")
    shown = shutil.which("nvdisasm") or next(_beside(), None)
    if shown is None:
        raise ImportError("no nvdisasm: pip install nvidia-cuda-nvdisasm, or triton, which holds it")
    return nvcc, shown


def _beside() -> Iterator[str]:
    """Returns the headers that packages bring along."""
    for package in ("nvidia", "triton"):
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or [] if spec else []:
            yield from map(str, sorted(Path(folder).glob("**/nvdisasm")))


def attend(variant: Variant, architecture: int) -> MachineCode:
    """lamina_attend as it is compiled. Raises ImportError as ``tools``, CalledProcessError where it cannot be."""
    nvcc, nvdisasm = tools()
    with tempfile.TemporaryDirectory() as place:
        cubin = f"{place}/kernels.cubin"
        flags = [f"-arch=sm_{architecture}", *options(variant), "-cubin", str(SOURCES / "kernels.cu"), "-o", cubin]
        subprocess.run([nvcc, *flags], check=True, capture_output=True, text=True)
        shown = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    parts = re.split(r"\.section\s+\.text\.(\w+)", shown)
    return machine(dict(zip(parts[1::2], parts[2::2], strict=True))["lamina_attend"])


def machine(text: str) -> MachineCode:
    """Returns the machine code of a section that nvdisasm shows."""
    lines, labels = list[str](), dict[str, int]()
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1].strip())
    names, nexts = list[str](), list[list[int]]()
    for at, line in enumerate(lines):
        predicate, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        names.append(rest.split()[0].split(".")[0])
        after = [at + 1] if at + 1 < len(lines) else []
        if names[-1] == "BRA":
            target = re.search(r"`\((\.L_x_\d+)\)", rest)
            some_stay = predicate or re.search(r"\bBRA[\w.]*\s+!?UP|\bBRA[\w.]*\s+!?P\d|\.DIV", rest)
            after = [labels[target[1]] if target else at, *(after if some_stay else [])]
        elif names[-1] in ("EXIT", "RET") and not predicate:
            after = []
        nexts.append(after)
    return MachineCode(names, nexts)


def way(code: MachineCode, start: int, end: int) -> list[int]:
    """The fewest instructions from ``start`` to ``end``, both included; empty: there is no way."""
    before: dict[int, int] = {start: start}
    queue = deque([start])
    while queue and end not in before:
        for after in code.nexts[at := queue.popleft()]:
            if after not in before:
                before[after] = at
                queue.append(after)
    if end not in before:
        return []
    steps = [end]
    while steps[-1] != start:
        steps.append(before[steps[-1]])
    return steps[::-1]


def of_tile(code: MachineCode, copies: int) -> Counter[str]:
    """Returns what a warp runs for a tile of which it issues ``copies`` instructions that copy, by name."""
    products = [at for at, name in enumerate(code.names) if name == PRODUCT]
    first, last = products[0], products[-1]
    multiplied, best = way(code, first, last), list[int]()
    for copy in (at for at, name in enumerate(code.names) if name == COPY):
        there, back = way(code, last, copy), way(code, copy, first)
        loop = [*multiplied[:-1], *there[:-1], *back[:-1]]
        count = Counter(code.names[at] for at in loop)
        if there and back and count[COPY] >= copies and count[PRODUCT] == len(products):
            best = min(best, loop, key=len) if best else loop
    if not best:
        raise ValueError(f"no loop over tiles with {copies} copies: the kernel has changed, and so must this count")
    return Counter(code.names[at] for at in best)
