"""``lamina-launch``: the command line. Each sub-command is a module with two functions:
``add_arguments(parser)`` and ``run(args) -> exit status``; it is imported when it is chosen."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module

from lamina import __version__
from lamina.workers.worker_process import ExitPromptly

from .common.parser import Parser

GARBAGE_OBJECTS = 20_000  # new ones, until Python looks for garbage among them

# sub-command, of one word or two -> (module, one line for --help)
COMMANDS = {
    "generate": ("cli.generate", "complete prompts and print the text as it comes"),
    "serve": ("cli.serve", "answer OpenAI's HTTP API"),
    "chat": ("cli.chat", "chat in the terminal, with a model or with a server"),
    "scale": ("cli.operate.scale", "give a running server other numbers of workers; its streams stay open"),
    "drain": (
        "cli.operate.drain",
        "have a running server refuse new requests and finish all others; or have it accept them again",
    ),
    "cordon": (
        "cli.operate.cordon",
        "have new sequences avoid one memory worker of a running server; or have them begin there again",
    ),
    "worker": ("cli.worker", "look after one worker of a driver that runs with --launcher static"),
    "ledger": ("cli.lending.ledger", "keep or show the ledger of memory that deployments lend each other"),
    "lend": ("cli.lending.lend", "lend this host's memory to engines elsewhere, by the ledger"),
    "cluster": ("cli.cluster", "start, show and end a Ray cluster for workers on several hosts"),
    "plan": ("tools.plan.command", "say which devices to buy for a trace of requests, and whether to split at all"),
    "plan simulate": ("tools.plan.simulate", "conduct a trace of prompts over prefill workers on a virtual clock"),
    "timeline": (
        "tools.timeline.command",
        "say what kept each pool from working, from a trace of a run",
    ),
    "bench": ("tools.bench", "measure a server, an engine or a transport"),
    "check": ("tools.check", "run a model in many settings and say which give the same tokens, or the same bits"),
    "drill": ("tools.drill", "hit processes of a server while streams are read, and compare each stream"),
    "doctor": ("cli.doctor", "check what each transport needs of this machine, and say how to get it"),
    "sessions": ("cli.operate.sessions", "list the sessions of a running server, or drop one"),
    "kv": ("cli.operate.kv", "show the contents of a directory of stored KV, verify it, or purge it"),
    "explain": ("tools.explain", "show how a model is cut: slices, bytes across each cut, messages"),
}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 = done, 1 = a worker was lost, 2 = bad input (one line on stderr), 130 = interrupted, 141 = the
    output has no reader any more, 143 = SIGTERM.
    """
    try:
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where an error can still be printed
    except BrokenPipeError:  # the reader has enough, as in `| head`: end without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # also while modules are imported
        _say("interrupted", logging.WARNING)
        return 130


def _main(argv: list[str]) -> int:
    parser = Parser(
        prog="lamina-launch", description="decode language models, with their attention on memory workers",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"lamina {__version__}")
    if (two := " ".join(argv[:2])) in COMMANDS:
        argv = [two, *argv[2:]]
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    for name, (module, help) in COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        if name == chosen:
            import_module(f"lamina.{module}").add_arguments(sub)
    args = parser.parse_args(argv)
    return _guarded(import_module(f"lamina.{COMMANDS[args.command][0]}").run, args)


def _guarded(run: object, args: argparse.Namespace) -> int:
    from lamina.protocol.executor import WorkerError

    try:
        with _ended_by_sigterm():
            status: int = run(args)  # type: ignore[operator]
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as e:
        _say(f"lamina-launch {args.command}: {_one_line(e)}", logging.ERROR)
        return 2
    except WorkerError as e:
        _say(f"lamina-launch {args.command}: {_one_line(e)}", logging.ERROR)
        return 1
    return status


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a command like Ctrl-C does: its workers end in order."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str, level: int) -> None:
    from lamina.observe.log_lines import say

    say(text, level)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def run_program() -> None:
    """``main``, as all that this process does."""
    end = ExitPromptly()
    import_module("lamina.observe.log_lines").log_as_told("lamina-launch")
    # Imports leave hardly any garbage: to look for it after every 700 objects is an eighth of their time.
    gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])
    try:
        end.status = main()
    except SystemExit as e:  # of argparse, or by a signal
        if e.code is None or isinstance(e.code, int):
            end.status = e.code or 0
        raise
    sys.exit(end.status)


if __name__ == "__main__":
    run_program()
