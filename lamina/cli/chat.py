"""``lamina-launch chat MODEL|URL``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from http.client import HTTPException
from typing import Any, Protocol

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import flat_options
from lamina.protocol.executor import WorkerError
from lamina.request import SamplingParams

from .common.config_file import add_config_flag
from .common.flags import add_engine_flags, engine_config, print_config
from .common.parser import Parser
from .operate.operator_client import check_key, check_url, error_words, no_answer_text, open_url, send_request

COMMANDS = "/new begins anew, /system TEXT sets the system prompt, /quit or Ctrl-D ends, Ctrl-C stops an answer"
ASK_S = 10.0  # for the names of a server's model
SILENCE_S = 600.0  # within an answer
MAX_LINE_BYTES = 2 << 20
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
Messages = list[dict[str, str]]


class Speaker(Protocol):
    """An engine of this process, or a server."""

    name: str

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Yield the text as it comes; closing the iterator stops it. Ctrl-C raises KeyboardInterrupt or ends it. Raises
        ValueError for messages that are refused, OSError where no server answers.
        """
        ...


def add_arguments(parser: Parser) -> None:
    """The flags of this sub-command."""
    parser.add_argument(
        "model", metavar="MODEL|URL", help="a directory, a GGUF file or a hub id, or a server: http://127.0.0.1:8000"
    )
    parser.add_argument("--system", default="", help="the system prompt (default: none)")
    parser.add_argument(
        "--api-key",
        default="",
        help="the API key of a server at URL; default: LAMINA_API_KEY, which other users cannot see",
    )
    parser.add_argument("--temperature", type=float, help="0 = greedy (default: the model's)")
    parser.add_argument(
        "--top-p",
        type=float,
        help="sample from the most likely tokens up to this total probability (default: the model's)",
    )
    parser.add_argument("--max-tokens", type=int, help="the most tokens of an answer (default: no limit)")
    add_config_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; raises ValueError for bad input, OSError where no server answers."""
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "max_tokens")}
    sampling = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**sampling)
    if args.model.startswith(("http://", "https://")):
        key = _first_key(args.api_key or os.environ.get("LAMINA_API_KEY", ""))
        check_url(args.model)
        if args.dry_run:
            print(f"would chat with the server at {args.model}")
        else:
            _converse(_Server(args.model, key, sampling), args.system)
        return 0
    config = engine_config(args)
    if args.print_config:
        print_config(config, model=args.model)
    elif args.dry_run:
        from .common.preflight import check, workers_that_would_start

        check(args.model, config)
        print(workers_that_would_start(args.model, config))
    else:
        with _engine(args.model, config, sampling) as speaker:
            _converse(speaker, args.system)
    return 0


def _first_key(keys: str) -> str:
    """Return the first of a server's keys, which are separated by commas. Raises ValueError for an unusable one."""
    key = keys.partition(",")[0].strip()
    check_key(key, "LAMINA_API_KEY, or --api-key,")
    return key


class _Server:
    """A server's model, over OpenAI's API."""

    def __init__(self, url: str, key: str, sampling: dict[str, float | int]) -> None:
        """``key``: one of the server's; empty: it has none."""
        self._url, self._sampling = url.rstrip("/").removesuffix("/v1"), sampling
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        keyless = "a valid API key is needed: set LAMINA_API_KEY to a key of that server"
        models = send_request(self._url, "/v1/models", key, ASK_S, "data", keyless=keyless)
        try:
            self.name = msgspec.convert(models, _Models).data[0].id
        except (msgspec.ValidationError, IndexError):
            raise OSError(f"{self._url}/v1/models names no model: is it the address of OpenAI's API?") from None

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._sampling}
        url = f"{self._url}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), self._headers)
        try:
            with open_url(request, SILENCE_S) as response:
                while line := response.readline(MAX_LINE_BYTES):
                    field, _, data = line.partition(b":")
                    if field == b"data" and data.strip() == b"[DONE]":
                        return
                    if field == b"data" and data.strip():
                        yield _text(data)
            raise OSError("the connection ended before the answer did")
        except urllib.error.HTTPError as error:
            with error:
                text = error_words(error.read()) or f"the server answers with status {error.code}"
                raise ValueError(text) from None
        except (urllib.error.URLError, HTTPException) as error:
            raise OSError(no_answer_text(url, getattr(error, "reason", error))) from None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """A chunk of a server's stream, as far as it is shown."""

    choices: list[_Choice] = []
    error: _Error | None = None


def _text(data: bytes) -> str:
    """Return the text that an event of a stream brings. Raises ValueError for one that ends it by an error, OSError for
    what is no event of a chat.
    """
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OSError(f"the server has sent what is no chunk of a chat: {error}") from None
    if event.error is not None:
        raise ValueError(event.error.message)
    return "".join(choice.delta.content or "" for choice in event.choices)


def _plain(text: str) -> str:
    """Return a text without the characters that would control the terminal."""
    return text.translate(_CONTROLS)


class _Engine:
    """A model in this process's own engine."""

    def __init__(self, name: str, llm: Any, params: SamplingParams) -> None:
        self.name, self._llm, self._params = name, llm, params

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        shown, prompt = 0, self._llm.renderer.render(self._llm.tokenizer, messages)
        with _asked_to_stop() as is_asked, contextlib.closing(self._llm.stream(prompt, self._params)) as stream:
            for output in stream:
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)
                if is_asked():
                    return


@contextlib.contextmanager
def _engine(model: str, config: EngineConfig, sampling: dict[str, float | int]) -> Iterator[_Engine]:
    """Start an engine. Raises ValueError, before that, for a model that cannot chat."""
    from .common.preflight import check_prompts, stated_limit

    if sys.stderr.isatty():  # imports alone take seconds
        print(f"starting {model}", file=sys.stderr)
    tokenizer = check_prompts(model, config, [], stated_limit(model, config))
    if not tokenizer.chat_template:
        raise ValueError(f"{model} has no chat template: complete prompts with `lamina-launch generate`")
    from lamina.api.llm import CommandLLM

    with CommandLLM(model, tokenizer=tokenizer, progress=sys.stderr.isatty(), **flat_options(config)) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens = None
        for name, value in sampling.items():
            setattr(params, name, value)
        yield _Engine(model, llm, params)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Any]:
    """Yield a function that returns whether Ctrl-C was pressed: an exception within a step would end the workers. A
    second Ctrl-C raises.
    """
    asked = list[int]()

    def note(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _converse(speaker: Speaker, system: str) -> None:
    """Read lines, and print answers, until the end of the input."""
    if is_terminal := sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # lets input() edit lines and recall them
        print(f"{_plain(speaker.name)}: {COMMANDS}")
    talk: Messages = []
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            print() if is_terminal else None
            return
        except KeyboardInterrupt:
            print()
            continue
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return
        if word == "/new":
            talk = []
        elif word == "/system":
            system = rest.strip()
        elif line.startswith("/"):
            print(f"unknown command {_plain(word)}: {COMMANDS}", file=sys.stderr)
        elif line:
            _turn(speaker, system, talk, line)


def _turn(speaker: Speaker, system: str, talk: Messages, line: str) -> None:
    """Print the answer to ``line``, and add both to ``talk``; a question without any answer is dropped."""
    talk.append({"role": "user", "content": line})
    said, error = "", ""
    try:
        messages = [*([{"role": "system", "content": system}] if system else []), *talk]
        with contextlib.closing(speaker.answer(messages)) as pieces:
            for piece in pieces:
                said += piece
                print(_plain(piece), end="", flush=True)
    except KeyboardInterrupt:
        pass
    except WorkerError:
        raise
    except (ValueError, OSError) as e:
        error = _plain(" ".join(str(e).split()))
    print(flush=True)
    if error:
        print(f"lamina-launch chat: {error}", file=sys.stderr)
    if said:
        talk.append({"role": "assistant", "content": said})
    else:
        talk.pop()
