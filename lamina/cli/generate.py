"""``lamina-launch generate MODEL --prompt ...``"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from lamina.config.conflicts import need_text
from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import flat_options
from lamina.engine.tuning.tuner import Tuner
from lamina.facts.report import count_text
from lamina.request import RequestOutput, SamplingParams, StructuredOutputsParams
from lamina.request.structured_outputs import FORMS

from .common.config_file import add_config_flag
from .common.flags import add_engine_flags, engine_config, print_config
from .common.parser import Parser
from .common.preflight import check_gpus

DEFAULTS = SamplingParams(temperature=0.0, max_tokens=64)
ABOUT_DEFAULTS = (
    "Without flags, decoding is greedy and ends after 64 tokens. In Python and over HTTP the defaults are vLLM's: "
    "SamplingParams draws at temperature 1.0, and the server as the model's generation_config.json says."
)
SAMPLING = {  # of SamplingParams
    "n": "completions of each prompt",
    "max_tokens": "the most tokens of a completion",
    "temperature": "0 = greedy",
    "top_p": "sample from the most likely tokens up to this total probability",
    "top_k": "sample from this many most likely tokens; 0 = all",
    "min_p": "sample from tokens with at least this share of the highest probability",
    "presence_penalty": "subtracted from the logit of each token in the completion",
    "frequency_penalty": "subtracted from a token's logit for each time that the completion has it",
    "repetition_penalty": "divides the logits of tokens in the prompt or the completion",
    "min_tokens": "the fewest tokens before a stop token may end the text",
    "logprobs": "alternatives to report for each token, with --json",
}
_FLAGS = {name: flag_name(name) for name in (*SAMPLING, "stop", "structured_outputs")} | {"seed": "--sampling-seed"}
_TYPES = {"logprobs": int}  # where the default is None


def add_arguments(parser: Parser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("model", help="a directory, a GGUF file or a hub id")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    parser.add_argument("--prompt-file", help="a file with one prompt per line; - for standard input")
    parser.add_argument("--json", action="store_true", help="one JSON line for each prompt, once it is finished")
    group = parser.add_argument_group("sampling", ABOUT_DEFAULTS)
    for name, help in SAMPLING.items():
        default = getattr(DEFAULTS, name)
        text = f"{help} (default: {'none' if default is None else default})"
        group.add_argument(flag_name(name), type=_TYPES.get(name, type(default)), default=default, help=text)
    group.add_argument(
        "--stop", action="append", default=[], help="a string that ends the text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-text token")
    group.add_argument(
        "--structured-outputs", default="", metavar="JSON",
        help='the structure of the text, as {"json": SCHEMA}, {"regex": ...}, {"choice": [...]} or {"grammar": ...}; '
        "@FILE reads it from a file",
    )  # fmt: skip
    group.add_argument(
        "--sampling-seed", type=int, default=None, help="seed of every prompt; default: derived from --seed"
    )
    add_config_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; raises ValueError for bad input."""
    config = engine_config(args)
    params = _sampling(args)
    if params.logprobs is not None and not args.json:
        raise ValueError(need_text("generate --logprobs", ["generate --json"]))
    prompts = args.prompt + _read_prompts(args.prompt_file)
    if args.print_config:
        print_config(config, model=args.model)
        return 0
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE")
    if args.dry_run:
        return _dry_run(args.model, config, prompts, params.max_tokens)
    check_gpus(config)
    tokenizer = _tokenizer(args.model, config, prompts, params.max_tokens)
    from lamina.api.llm import CommandLLM

    with CommandLLM(args.model, tokenizer=tokenizer, progress=sys.stderr.isatty(), **flat_options(config)) as llm:
        text = _Text(live=len(prompts) * params.n == 1)
        show = _print_json if args.json else text
        try:
            for output in llm.stream(prompts, params):
                show(output)
        finally:
            text.end()
        if (tuner := llm.engine.feature(Tuner)) and tuner.reason:
            print(f"--pipeline auto: {tuner.reason}", file=sys.stderr)
    return 0


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Raises ValueError by the names of the flags."""
    try:
        return SamplingParams(
            **{name: getattr(args, name) for name in SAMPLING},
            stop=args.stop,
            ignore_eos=args.ignore_eos,
            seed=args.sampling_seed,
            structured_outputs=_structured_outputs(args.structured_outputs),
        )
    except ValueError as e:
        raise ValueError(re.sub(r"\w+", lambda word: _FLAGS.get(word[0], word[0]), str(e))) from None


def _structured_outputs(given: str) -> StructuredOutputsParams | None:
    """Raises ValueError by the name of the flag."""
    if not given:
        return None
    flag = "--structured-outputs"
    try:
        value = json.loads(Path(given[1:]).read_text() if given.startswith("@") else given)
    except OSError as e:
        raise ValueError(f"{flag} {given}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"{flag} is no JSON: {e}") from None
    if not isinstance(value, dict) or not set(value) <= {*FORMS, "disable_any_whitespace"}:
        raise ValueError(f"{flag} must be a JSON object with one of {', '.join(FORMS)}, not {given[:80]}")
    return StructuredOutputsParams(**value)


def _read_prompts(path: str | None) -> list[str]:
    if path is None:
        return []
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"--prompt-file {path} is not UTF-8: byte {data[e.start]:#04x} at {e.start}") from None
    return [line for line in text.splitlines() if line.strip()]


def _tokenizer(model: str, config: EngineConfig, prompts: list[str], max_tokens: int | None) -> Any:
    """The model's, once it is known that the prompts will do: that takes seconds less than a start."""
    from .common.preflight import stated_limit

    return _checked(model, config, prompts, max_tokens, stated_limit(model, config))


def _dry_run(model: str, config: EngineConfig, prompts: list[str], max_tokens: int | None) -> int:
    from .common.preflight import check, workers_that_would_start

    _checked(model, config, prompts, max_tokens, check(model, config))
    print(workers_that_would_start(model, config))
    print(f"would complete {count_text(len(prompts), 'prompt')}")
    return 0


def _checked(model: str, config: EngineConfig, prompts: list[str], max_tokens: int | None, limit: int) -> Any:
    from .common.preflight import check_prompts, truncation_message

    tokenizer = check_prompts(model, config, prompts, limit)
    if max_tokens is not None and (note := truncation_message(tokenizer, prompts, max_tokens, limit)):
        print(f"lamina-launch generate: {note}", file=sys.stderr)
    return tokenizer


def _print_json(output: RequestOutput) -> None:
    if output.finished:
        print(json.dumps(dataclasses.asdict(output)), flush=True)


class _Text:
    """Streams a single completion as it comes; several are printed whole, in the order in which prompts finish."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._shown = 0

    def __call__(self, output: RequestOutput) -> None:
        if self._live:
            text = output.outputs[0].text
            sys.stdout.write(text[self._shown :])
            self._shown = len(text)
            if output.finished:
                self.end()
        elif output.finished:
            for completion in output.outputs:
                sys.stdout.write(f"{output.prompt}{completion.text}\n\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Whatever is printed next begins a line."""
        if self._shown:
            print(flush=True)
            self._shown = 0
