"""Shared by all tests: one thread per process, since the machine's cores are shared by the workers under test."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soft_nic
from cuda_stand_in import ONE_GPU
from hypothesis import is_hypothesis_test, settings
from long_cases import spare_cases

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LAMINA_TRANSPORTS"] = ",".join(f"{scheme}={module}" for scheme, module in soft_nic.SCHEMES.items())

# Python keeps compiled modules next to their sources, even if the environment forbids it, as images of containers do.
# Otherwise each of the hundreds of processes under test would compile Lamina again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Processes find workers and transports of tests on this path. All tests have one path: another one means another
# zygote, 4 s of CPU. No folder of tests is called `lamina`: it would hide the product's.
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(HERE / "support" / "models"),
        str(HERE / "support"),
        str(HERE),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)

# Captures are kept, as a user's are, by all that they follow from: what has not changed since is not traced again.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["LAMINA_CACHE"] = str(Path(__file__).resolve().parents[1] / "build" / "tests" / "cache")

# The tests try the same examples every time, and half of what a property asks for; `make mutation` tries all of
# these, `make properties` new ones each time.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("whole", derandomize=True, deadline=None)
settings.register_profile("search", print_blob=True, deadline=None)
settings.load_profile("fixed")
ASKED = "_hypothesis_internal_use_settings"  # where a property keeps them, as hypothesis' own plugin of pytest reads it

# By transport or attention backend; a test that is parametrized with it carries the mark.
NEEDS = {
    "verbs": pytest.mark.rdma, "mlx5": pytest.mark.gpu, "cuda": pytest.mark.gpu, ONE_GPU: pytest.mark.gpu,
    "gin": pytest.mark.gpu, "flashinfer": pytest.mark.gpu,
}  # fmt: skip

# Failures of these folders' tests are wrong tokens or wrong bits, as are those of tests that compare with `reference`.
EXACT = {
    Path(__file__).parent / folder
    for folder in (
        "api/wrapped", "e2e/devices", "e2e/kv", "e2e/models", "netstack/bytes", "ops/attention",
        "ops/recurrence", "ops/sampling",
    )
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    spare_cases(config, items)
    if settings.get_current_profile_name() == "fixed":
        halve_examples({item.function for item in items if isinstance(item, pytest.Function)})
    for item in items:
        if "reference" in getattr(item, "fixturenames", ()) or not EXACT.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.no_retry)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            for scheme in NEEDS.keys() & {v for v in item.callspec.params.values() if isinstance(v, str)}:
                item.add_marker(NEEDS[scheme])


def halve_examples(tests: set[Callable[..., Any]]) -> None:
    for test in filter(is_hypothesis_test, tests):
        asked = vars(test).get(ASKED, settings.default)
        setattr(test, ASKED, settings(asked, max_examples=max(1, asked.max_examples // 2)))


# Imports and collected tests leave hardly any garbage: to look for it again and again takes a sixth of their time.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup() -> None:
    """Commands that a test runs in this process limit repeated warnings by filters; later tests must see them all."""
    for handler in (*logging.root.handlers, logging.lastResort):
        if handler is not None:
            handler.filters.clear()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Processes that later tests start inherit this thread's signal mask; with SIGTERM in it they cannot be ended."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]):
        pytest.fail(f"{item.nodeid} leaves SIGTERM blocked: have it served by another thread")


def pytest_collection_finish() -> None:
    share_handlers("torch")
    spare_garbage()


def share_handlers(above: str) -> None:
    """Loggers below ``above`` hand on to it what they alone would write. Of each logger that hands on nothing pytest
    captures that, by two handlers in each of three phases of each test: torch has 57. One is a trace of all that is
    captured of models, in JSON, which torch begins to write once it has a handler.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith(f"{above}.") and not logger.propagate:
            logger.propagate, logger.handlers = True, []


def spare_garbage() -> None:
    """Collections of garbage leave out torch, transformers and all tests, which would take half a second each time, and
    what little garbage they leave. They are rare: at Python's own thresholds they take 4 % of the time of all tests.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
