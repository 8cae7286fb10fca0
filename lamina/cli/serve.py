"""``lamina-launch serve MODEL --port ...``"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from msgspec import structs

from lamina.config.conflicts import OVERLOAD, PREFILL_POLICY, SLO_TBT, SLO_TTFT, need_text
from lamina.config.flag_groups import GROUP_OF, flag_name
from lamina.config.flat_options import OPTIONS
from lamina.config.option import options_of, parse_seconds
from lamina.facts.host_memory import memory_bytes
from lamina.facts.report import size_text
from lamina.models.chat_template import read_template
from lamina.models.checkpoint import check_source, peek_config
from lamina.observe.log_lines import log_json, say
from lamina.server.journal.journal_directory import check_journal_directory
from lamina.server.server_config import ServerConfig
from lamina.server.tls_files import check_tls_files
from lamina.utils.background_thread import LowPriorityCall
from lamina.utils.install_command import install_command

from .common.config_file import add_config_flag
from .common.flags import add_engine_flags, add_option_flags, engine_config, print_config
from .common.parser import Parser
from .common.preflight import check, check_gpus, workers_that_would_start

if TYPE_CHECKING:
    from lamina.server.journal.journal import Journal

TIMEOUTS = GROUP_OF["health_timeout_s"].options
NEEDS = ("fastapi", "httptools", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop")
SUBJECTS = {  # first option -> title of its flags and of those after it
    "host": "address and names", "api_key": "keys, TLS and browsers", "max_num_queued_reqs": "load and limits",
    "enable_force_include_usage": "answers", "header_timeout_s": "timeouts", "journal": "journal, page and logs",
}  # fmt: skip
ESSENTIAL = frozenset((  # of the server's flags, those that --help shows
    "--help", "--config", "--host", "--port", "--served-model-name", "--api-key", "--max-num-queued-reqs",
    "--chat-template", "--log-json",
))  # fmt: skip


def add_arguments(parser: Parser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("model", help="a directory, a GGUF file or a hub id")
    parser.essential = ESSENTIAL
    options, titles, title = options_of(ServerConfig), dict[str, str](), ""
    for name in options:
        titles[name] = title = SUBJECTS.get(name, title)
    add_option_flags(parser, options, titles, dict.fromkeys(TIMEOUTS, _seconds))
    add_config_flag(parser)
    add_engine_flags(parser, [name for name in OPTIONS if name != "decode_only"])
    parser.set_defaults(decode_only=False)  # known to --config, since --print-config writes it


def _seconds(text: str) -> float:
    """Seconds of a number, or of a time with its unit. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        return parse_seconds(text, "")


def _key(name: str, given: str) -> str:
    """Return a key from its flag or its variable. Raises ValueError for a variable without a key in it."""
    variable = f"LAMINA_{name.upper()}"
    if given:
        say(f"{flag_name(name)}: other users of this host can see it; set {variable} instead", logging.WARNING)
    elif variable in os.environ and not os.environ[variable].strip(" ,\t\n"):
        raise ValueError(f"{variable} is set and blank: give a key, or unset it")
    return given or os.environ.get(variable, "")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 after an orderly end, 1 where the engine was lost; raises ValueError for bad input."""
    if args.log_json:  # perhaps by --config
        log_json("server")
    options, defaults = {name: getattr(args, name) for name in options_of(ServerConfig)}, ServerConfig()
    options |= {name: _key(name, options[name]) for name in ("api_key", "admin_key")}
    config, engine = ServerConfig(**options), engine_config(args)
    if config.prefill_policy != defaults.prefill_policy and not engine.topology.prefill_workers:
        raise ValueError(need_text(PREFILL_POLICY, ["--prefill-workers"]))
    if config.overload != defaults.overload and not (config.slo_ttft or config.slo_tbt):
        raise ValueError(need_text(OVERLOAD, [SLO_TTFT, SLO_TBT]))
    if config.chat_template:
        read_template(config.chat_template)
    if args.print_config:
        secret = {name: "***" for name in ("api_key", "admin_key") if getattr(config, name)}
        shown = {**structs.asdict(config), **secret}
        print_config(engine, model=args.model, **shown)
        return 0
    check_tls_files(config.ssl_certfile, config.ssl_keyfile)
    if args.dry_run:
        if config.journal:
            check_journal_directory(config.journal)
        check(args.model, engine)
        with listener(config):
            pass
        print(workers_that_would_start(args.model, engine))
        bodies, answers = map(size_text, config.memory_limits(memory_bytes()))
        print(f"would hold at most {bodies} of bodies and prompts, and {answers} of answers (--limits)")
        print(f"would serve {args.model} as {', '.join(config.names(args.model))} on {_place(config)}")
        return 0
    return _serve(args.model, config, engine)


def _serve(model: str, config: ServerConfig, engine: Any) -> int:
    if missing := [name for name in NEEDS if find_spec(name) is None]:  # imported later: the engine is to start first
        raise ImportError(f"serve needs {', '.join(missing)}: {install_command(*missing)}")
    from lamina.executor.launchers.local import worker_environment
    from lamina.executor.launchers.zygote_client import START
    from lamina.server.engine_client.launch import launch_engine
    from lamina.server.engine_client.messages import StartEngine

    check_gpus(engine)
    check_source(model)
    peek_config(model, engine.model)
    for secret in ("LAMINA_API_KEY", "LAMINA_ADMIN_KEY"):  # workers and hosts elsewhere get this environment
        os.environ.pop(secret, None)
    with _journal(model, config) as journal, listener(config) as sock:
        url = _url(config, sock)
        START.get(worker_environment(0))
        importing = LowPriorityCall(_run_server, "lamina-import")  # while the warm process imports, too
        start = StartEngine(
            model=model,
            tokenizer=config.tokenizer,
            config=engine,
            conductor_config=config.conductor_config,
            log_level=config.log_level,
            is_first=True,
        )
        handle = launch_engine(start)
        try:
            run_server = importing.result()
            return run_server(model, config, engine, handle, sock, lambda: say_ready(model, config, url), journal)
        finally:
            handle.sock.close()
            handle.join(1.0)


@contextmanager
def _journal(model: str, config: ServerConfig) -> Iterator[Journal | None]:
    """Opens the journal before anything is started, so that its errors come at once."""
    if not config.journal:
        yield None
        return
    from lamina.server.journal.journal import Journal

    journal = Journal(config.journal, model, config.journal_bytes)
    try:
        yield journal
    finally:
        journal.close()


def _run_server() -> Callable[..., int]:
    import uvloop

    from lamina.server.run import serve

    return lambda *args: uvloop.run(serve(*args))


@contextmanager
def listener(config: ServerConfig) -> Iterator[socket.socket]:
    """Bound, so that a port in use is known at once; uvicorn listens once the engine is ready."""
    if config.uds:
        with _unix_listener(config.uds) as sock:
            yield sock
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except OSError as e:
            raise OSError(f"cannot listen on --host {config.host} --port {config.port}: {e.strerror}") from e
        yield sock


@contextmanager
def _unix_listener(path: str) -> Iterator[socket.socket]:
    """Listens at ``path`` and removes it at the end. Replaces the socket of a dead server, and no other file."""
    failed = f"cannot listen on --uds {path}"
    with _claim(path, failed), socket.socket(socket.AF_UNIX) as sock:
        try:
            if _is_left_behind(path):
                os.unlink(path)
            sock.bind(path)
        except OSError as e:
            raise OSError(f"{failed}: {e.strerror}") from e
        os.chmod(path, 0o600)
        try:
            yield sock
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)


@contextmanager
def _claim(path: str, failed: str) -> Iterator[None]:
    """Lock a file next to a socket: a server that starts does not listen yet. The lock ends with its process."""
    beside = f"{path}.lock"
    try:
        lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise OSError(f"{failed}: {beside} cannot be opened: {e.strerror}") from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_its_file = os.path.samestat(os.fstat(lock), os.stat(beside))
        except OSError:
            is_its_file = False  # another server holds it, or has just removed it
        if not is_its_file:
            raise OSError(f"{failed}: another server has it, or is about to")
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside)
    finally:
        os.close(lock)


def _is_left_behind(path: str) -> bool:
    """Return True if ``path`` is a socket of this user's without a listener."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def say_ready(model: str, config: ServerConfig, url: str) -> None:
    print(f"serving {config.names(model)[0]} on {url}", flush=True)
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.uds and not config.api_keys:
        say("anybody who reaches this address may use it: set LAMINA_API_KEY", logging.WARNING)


def _url(config: ServerConfig, sock: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _place(config: ServerConfig) -> str:
    return config.uds or f"{config.host}:{config.port or 'any free port'}"
