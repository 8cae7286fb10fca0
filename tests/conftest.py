"""Shared by all tests: one thread per process, since the machine's cores are shared by the workers under test."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from cuda_stand_in import ONE_GPU
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LAMINA_NIC_MODEL", "1")  # the transport nic-model opens

# Compiled modules are kept beside their sources, also where the environment says otherwise, as images of containers do:
# else each of the hundreds of processes under test compiles Lamina anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Workers that tests bring are found there. All tests have one path: another one means another warm process, 4 s of CPU.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "e2e"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Captures are kept for one run of the tests, by all of its processes: each model is traced anew by every run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["LAMINA_CACHE"] = tempfile.mkdtemp(prefix="lamina-cache-")
    atexit.register(shutil.rmtree, os.environ["LAMINA_CACHE"], ignore_errors=True)

# `make test` tries the same examples every time; `make properties` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", print_blob=True, deadline=None)
settings.load_profile("fixed")

# By transport or attention backend; a test that is parametrized with it carries the mark.
NEEDS = {
    "verbs": pytest.mark.rdma, "cuda": pytest.mark.gpu, ONE_GPU: pytest.mark.gpu, "flashinfer": pytest.mark.gpu,
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            for scheme in NEEDS.keys() & {v for v in item.callspec.params.values() if isinstance(v, str)}:
                item.add_marker(NEEDS[scheme])


# Imports and collected tests leave hardly any garbage: to look for it again and again takes a sixth of their time.
gc.disable()


def pytest_collection_finish() -> None:
    """Full collections of garbage leave out torch, transformers and all tests: half a second each, often a dozen.

    Others are rare: at Python's own thresholds they are 4 % of the time of all tests, and hardly find any.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
