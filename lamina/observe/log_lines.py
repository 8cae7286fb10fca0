"""Log lines of a process of Lamina on stderr: text for people, or a JSON object a line.

With ``--log-json`` a process writes all of its logging, Python's warnings and uncaught exceptions as JSON.
LAMINA_LOG_JSON hands that down to the processes that it starts.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from lamina.env import LOG_JSON
from lamina.utils.log_limit import limit_repeats

NO_REQUEST = "-"
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default=NO_REQUEST)
logger = logging.getLogger(__name__)


class LogFormatter(logging.Formatter):
    """Log lines with the id of their request; ``as_json`` makes each a JSON object."""

    def __init__(self, *, as_json: bool, process: str = "") -> None:
        """``process``: what this process is, such as "memory"; in JSON only."""
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._as_json, self._process = as_json, process

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 # the part before a traceback
        about = REQUEST_ID.get()
        fields = getattr(record, "fields", {}) | ({"request_id": about} if about != NO_REQUEST else {})
        return super().formatMessage(record) + "".join(f" {k}={_quoted(v)}" for k, v in fields.items())

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return super().format(record)
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            "process": self._process,
            "pid": os.getpid(),  # a fork of this process has another one
            "request_id": REQUEST_ID.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):  # of other packages: logging itself would print a traceback as text
        return f"{record.msg} {record.args!r}"


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) and (" " in value or not value.isprintable()) else str(value)


class _JsonHandler(logging.StreamHandler[Any]):
    """Writes records, and lines of other processes, to stderr. Each line is whole, whichever thread writes it."""

    def write_line(self, line: str) -> None:
        self.acquire()
        try:
            with suppress(OSError, ValueError):  # its reader has ended, or its disk is full
                self.stream.write(line + self.terminator)
                self.flush()
        finally:
            self.release()


def _json_handler() -> _JsonHandler | None:
    return next((h for h in logging.getLogger().handlers if isinstance(h, _JsonHandler)), None)


def is_json() -> bool:
    """Return whether this process logs JSON."""
    return _json_handler() is not None


def json_environment() -> dict[str, str]:
    """Return the variables by which a child of this process logs as this process does."""
    return {LOG_JSON: "1"} if is_json() else {}


def forward(line: str) -> None:
    """Write a line of JSON that another process has logged, between those of this process."""
    if (handler := _json_handler()) is not None:
        handler.write_line(line)


def say(text: str, level: int = logging.INFO) -> None:
    """Write a line for people to stderr; as JSON if this process logs JSON."""
    if (handler := _json_handler()) is None:
        sys.stderr.write(f"{text}\n")
    else:
        handler.handle(logger.makeRecord(logger.name, level, "", 0, text, (), None))


def log_as_told(process: str, environ: Mapping[str, str] = os.environ) -> None:
    """Log JSON if LAMINA_LOG_JSON asks for it; limit repeated warnings in any case. ``process``: see LogFormatter."""
    if environ.get(LOG_JSON, "") not in ("", "0"):
        log_json(process)
    limit_repeats()


def set_up_server_log(*, as_json: bool, level: str = "info") -> None:
    """Log lines of this package, and warnings of all others, to stderr: also Python's warnings, and uncaught exceptions
    of all threads. A process that logs JSON by LAMINA_LOG_JSON goes on with it.
    """
    handler: logging.Handler
    if as_json or is_json():
        handler = log_json("server")
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(LogFormatter(as_json=False))
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    limit_repeats()
    log = logging.getLogger("lamina")
    log.handlers, log.propagate = [handler], False
    log.setLevel(level.upper())


def log_json(process: str) -> logging.Handler:
    """Log JSON from now on. ``process``: see LogFormatter."""
    handler = _JsonHandler()
    handler.setFormatter(LogFormatter(as_json=True, process=process))
    logging.getLogger().handlers = [handler]
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
    sys.unraisablehook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
    return handler


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        logger.error("uncaught exception", exc_info=(kind, error, trace))
