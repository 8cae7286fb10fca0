"""A warning that repeats is limited, in every process, and counted."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from lamina.utils.log_limit import MOST, MOST_TEXTS, WINDOW_S, RepeatLimit


class LimitedLog:
    """A log whose time the test sets."""

    def __init__(self) -> None:
        self.now, self._text = 0.0, io.StringIO()
        self.log = logging.getLogger("limited")
        self.log.propagate = False
        handler = logging.StreamHandler(self._text)
        handler.addFilter(RepeatLimit(lambda: self.now))
        self.log.handlers = [handler]
        self.log.setLevel(logging.INFO)

    def lines(self) -> list[str]:
        return self._text.getvalue().splitlines()


def test_the_same_warning_is_shown_so_many_times_a_minute_and_the_rest_is_counted() -> None:
    limited = LimitedLog()
    for number in range(MOST + 7):
        limited.log.warning("lost %d", number)
        limited.log.info("request %d", number)
    limited.log.error("another one")
    warnings = [line for line in limited.lines() if line.startswith("lost")]
    assert warnings == [f"lost {n}" for n in range(MOST - 1)] + [f"lost {MOST - 1} (more like it are counted for 60 s)"]
    assert sum(line.startswith("request") for line in limited.lines()) == MOST + 7
    assert limited.lines()[-1] == "another one"
    limited.now = WINDOW_S - 0.1
    limited.log.warning("lost %d", 1)
    assert limited.lines()[-1] == "another one"
    limited.now = WINDOW_S
    for number in (50, 51):
        limited.log.warning("lost %d", number)
    assert limited.lines()[-2:] == ["lost 50 (8 more like it were held back)", "lost 51"]


def test_a_text_of_values_alone_is_told_apart_by_them_but_not_by_their_numbers() -> None:
    limited = LimitedLog()
    for number in range(MOST + 7):
        limited.log.warning("%s", f"page {number} is lost")
        limited.log.warning("%s: %s", "disk", OSError(number, "full"))
    limited.log.warning("%s", "a worker is lost")
    limited.log.warning("%s: %s", "network", OSError(3, "full"))
    assert len(limited.lines()) == 2 * MOST + 2
    assert limited.lines()[-2].startswith("a worker is lost")
    assert limited.lines()[-1].startswith("network: ")


def test_an_exception_is_not_hidden_by_others_with_the_same_text() -> None:
    limited = LimitedLog()

    def fail(calls: list[Callable[[], object]]) -> None:
        for call in calls:
            try:
                call()
            except (LookupError, ZeroDivisionError):
                limited.log.exception("failed")

    fail([lambda: {}["a"]] * (MOST + 7) + [lambda: 1 // 0, lambda: {}["b"]])
    shown = [line for line in limited.lines() if "Error: " in line]
    assert shown == ["KeyError: 'a'"] * MOST + ["ZeroDivisionError: integer division or modulo by zero"]

    def other() -> object:
        return {}["c"]

    fail([other])
    assert limited.lines()[-1] == "KeyError: 'c'"


def test_a_warning_whose_values_do_not_fit_fails_no_caller(capfd: pytest.CaptureFixture[str]) -> None:
    limited = LimitedLog()
    for _ in range(2 * MOST):
        limited.log.warning("lost %d", "a word")
    assert capfd.readouterr().err.count("TypeError: %d") == MOST


def test_texts_without_end_take_no_memory_without_end() -> None:
    limited = LimitedLog()
    for number in range(2 * MOST_TEXTS):
        limited.log.warning(f"lost {number}")  # noqa: G004 # as careless callers write it
        for _ in range(MOST):
            limited.log.warning("always")
    assert len(limited.lines()) == 2 * MOST_TEXTS + MOST * 2


@pytest.mark.long
@pytest.mark.parametrize(
    "begun_by",
    [
        "from lamina.observe.log_lines import set_up_server_log; set_up_server_log(as_json=True)",
        """
        from lamina.config.flat_options import make_config
        from lamina.server.engine_client.engine_process import set_up_engine_log
        from lamina.server.engine_client.messages import StartEngine
        set_up_engine_log(StartEngine(model="m", tokenizer="", config=make_config({})))
        """,
        """
        import os, socket, sys
        from lamina.workers.__main__ import main
        here, there = socket.socketpair()
        sys.modules["serving"] = type(sys)("serving")
        sys.modules["serving"].serve = lambda sock: None
        main(["serving:serve", "--control-fd", str(there.fileno())])
        """,
    ],
    ids=["server", "engine", "worker"],
)  # fmt: skip
def test_it_is_so_in_every_process(begun_by: str) -> None:
    repeat = "import logging\nfor n in range(99): logging.getLogger('lamina').error('lost %d', n)"
    program = f"{textwrap.dedent(begun_by)}\n{repeat}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert sum("lost" in line for line in done.stderr.splitlines()) == MOST, done.stderr
