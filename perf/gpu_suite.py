"""Everything that needs an NVIDIA GPU, in one run, planned for 10 minutes: ``python perf/gpu_suite.py --write``.

Compiles the kernels, runs the contract suite of the cuda backends, compares every head size with fp64, and replays one
CUDA graph over growing lengths. It measures attention over stored tokens in bytes per second, next to torch's and
FlashInferAttention's. The network: the contract over ``cuda``, and mlx5 kernels against software NICs (gpu/network.py).
With two GPUs: ranks that meet over NCCL, against the mesh (gpu/collective.py). End to end: tokens, speed and memory of
decoding with compute workers on the GPU, next to transformers (gpu/decode.py). A part that fails is recorded, and the
others run: exit status 1. Without a GPU it compiles what it can, and names the rest.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import BrokenError, parser_of, record, version

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # which has the software NIC
# Imports of the parts, in addition to torch; a part that lacks one is recorded as failed, and the others run.
PACKAGES = ("cupy", "hypothesis", "msgspec", "pytest", "pytest_timeout", "safetensors", "transformers", "tqdm")
BUILT = (
    "lamina.ops.attention._attention",
    "lamina.ops.gemm._gemm",
    "lamina.netstack.host._netstack",
    "soft_nic._native",
)
COMPILES = ("compile", "netstack kernels")  # parts that need no GPU

Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every part ran and kept its promises, or if there is no GPU; else 1."""
    parser = parser_of(__doc__)
    parser.add_argument("--replays", type=int, default=1000, help="of one graph (default 1000)")
    args = parser.parse_args(argv)
    if lacks := missing():
        print(f"gpu_suite: {lacks}", file=sys.stderr, flush=True)
    parts: dict[str, Callable[[], Result]] = {
        "compile": compile_kernels,
        "netstack kernels": netstack,
        "contract": contract,
        "transport": transport,
        "network": lambda: module("gpu.network").network(args.replays),
        "exactness": lambda: module("gpu.attention").exactness(),
        "graph": lambda: module("gpu.attention").graph(args.replays),
        "memory": lambda: module("gpu.attention").memory(),
        "launches": lambda: module("gpu.attention").launches(),
        "attention": lambda: module("gpu.attention").attention(),
        "eight bits": lambda: module("gpu.attention").eight_bits(),
        "collective": collective,
        "tokens": tokens,
        "decode": lambda: module("gpu.decode").speed(module("gpu.decode").GpuSettings()),
    }
    if not torch.cuda.is_available():
        said = [run_part(name, parts[name]) for name in COMPILES]
        notes = "; ".join(str(x.get("summary") or x.get("error")) for x in said)
        print(f"gpu_suite: no NVIDIA GPU that torch {torch.__version__} can use: nothing measured. Compiled: {notes}")
        print(f"skipped: {', '.join(name for name in parts if name not in COMPILES)}")
        return 0
    results = {name: run_part(name, part) for name, part in parts.items()}
    if "error" not in results["attention"]:
        module("gpu.attention").judge(results)
    show(results)
    settings = {
        "replays": args.replays,
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cupy": version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "flashinfer": version("flashinfer-python"),
    }
    record("gpu_suite", settings, {"parts": results}, write=args.write)
    return 1 if any("error" in result for result in results.values()) else 0


def module(name: str) -> Any:
    """Returns a module of this folder, imported when its part runs: what it lacks is that part's error."""
    return import_module(name)


def missing() -> str:
    """Returns what the parts need and is not here, and how to get it, in one line; empty: nothing."""
    packages = [name for name in PACKAGES if not _is_here(name)]
    built = [name for name in BUILT if not _is_here(name)]
    python = ".".join(platform.python_version_tuple()[:2])
    said = []
    if packages:
        names = " ".join(packages).replace("_", "-").replace("cupy", "cupy-cuda13x")
        said.append(
            f"not here: {', '.join(packages)}: pip install -e '.[dev]'; without a network, elsewhere: pip install "
            f"--target carried --only-binary=:all: --python-version {python} {names}, and PYTHONPATH=carried here"
        )
    if built:
        said.append(f"not built for Python {python}: {', '.join(built)}: make")
    return "; ".join(said)


def _is_here(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # of what it is in
        return False


def run_part(name: str, part: Callable[[], Result]) -> Result:
    """Returns what the part found, or its error, in the end; and its seconds."""
    start, result = time.perf_counter(), Result()
    try:
        result.update(part())
    except Exception as error:  # noqa: BLE001 - the other parts are to run
        result["error"] = f"{type(error).__name__}: {error}"[-2000:]
        if not isinstance(error, BrokenError):
            traceback.print_exc()
    result["seconds"] = round(time.perf_counter() - start, 1)
    print(f"{name}: {result.get('error', 'done')} ({result['seconds']} s)", file=sys.stderr, flush=True)
    return result


def pytest(*arguments: str, limit_s: float) -> Result:
    """A run of tests in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise BrokenError(f"pytest {' '.join(arguments)} took more than {limit_s:g} s") from None
    said = run.stdout.strip().splitlines()
    if run.returncode != 0:
        raise BrokenError("\n".join(said[-30:]) + run.stderr[-500:])
    return {
        "summary": said[-1].strip("= ") if said else "",
        "skipped": [line for line in said if line.startswith("SKIPPED")],
    }


def compile_kernels() -> Result:
    """Compiles by nvcc and NVRTC, whichever is here, for every architecture."""
    return pytest("tests/ops/attention/test_cuda_compile.py", limit_s=120)


def netstack() -> Result:
    """The device side of the network: its kernels compile to the instructions that order memory."""
    return pytest("tests/netstack/gpu/test_kernels.py", limit_s=60)


def transport() -> Result:
    """The contract of transports between two ends on this GPU: of processes, and of one process."""
    return pytest("-m", "gpu", "tests/contract/test_transports.py", limit_s=150)


def contract() -> Result:
    """The contract of attention backends, on this GPU."""
    return pytest("-m", "gpu", "tests/contract/test_attention.py", "-k", "cuda or flashinfer", limit_s=200)


def collective() -> Result:
    """Measures what ranks do together: the contract over ``nccl``, and its time against that of ``mesh``."""
    figures = Result(module("gpu.collective").nccl_against_mesh())
    if "skipped" in figures:
        return figures
    return {**figures, **pytest("tests/contract/test_collectives.py", "-k", "nccl", limit_s=120)}


def tokens() -> Result:
    """Compares tokens of the shipped model, with compute workers on this GPU and memory workers here and there."""
    decode = module("gpu.decode")
    shares: Result = decode.tokens_as_transformers(decode.GpuSettings())
    if bad := {n: part for n, part in shares.items() if not isinstance(part, float) or part < decode.LEAST_EQUAL}:
        raise BrokenError(f"of the tokens of transformers: {bad}")
    return shares


def show(results: dict[str, Result]) -> None:
    """One table of everything."""
    for name, result in results.items():
        for key, value in result.items():
            for label, x in value.items() if isinstance(value, dict) else [("", value)]:
                text = f"{x:.4g}" if isinstance(x, float) else "\n".join(map(str, x)) if isinstance(x, list) else str(x)
                print(f"{name:18} {key:14} {label:14} {text}")


if __name__ == "__main__":
    sys.exit(main())
