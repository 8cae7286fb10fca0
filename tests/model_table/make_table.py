"""Makes docs/families.md: which models of transformers give the same tokens on Lamina, and why others are refused.

python tests/model_table/make_table.py NAME ...       # some families: prints their lines
python tests/model_table/make_table.py --write        # all that build/families.jsonl lacks, then the page

Each model runs in a process of its own with a limit of CPU time, one after another. ``LLM`` runs a directory, and
``wrap`` a left-padded batch with other weights. Both are compared with ``generate`` of transformers, one prompt at a
time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "build" / "families.jsonl", ROOT / "docs" / "families.md"
CPU_LIMIT_S, LIMIT_S = 300, 1800.0  # of one model; the latter for one that waits
UNCACHED = ("moshi",)  # whose tokens with transformers' cache differ from those of its own forward of the whole text
NEW_TOKENS = 24
PROMPTS = (3, 21, 75)  # tokens; longer than the windows of most
TIE = 1e-4  # difference of the two best logits below which either token is right
VERDICTS = SAME, REFUSED, WRONG, NOT_BUILT, NOT_RUN = "same", "refused", "wrong", "not built", "not run"
# Kinds of reasons, by the texts of refusals; the first that fits.
REASONS = {
    "State of a recurrence, linear attention, convolution or position counter that Lamina does not support":
        r"outside of attention|is of type (linear|conv|hybrid|moe)|has no softmax attention.*\(\w*"
        r"(Mamba|Delta|Linear\w*Attention|Recurr|Conv|Rwkv|RWKV|Lightning|LSTM|Ssm|Mixer|Lru)\w*\)",
    "Attention that selects tokens by their content, compresses K and V, or keeps a cache of its own":
        "passes indices|is of type (indexed|compressed|heavily|minimax)|indexer|attends to|an index of its keys",
    "Attention that the model's own code computes, so that it cannot move to memory workers":
        "attentions that can be routed|has no softmax attention|cannot be cut|cannot run a step|alters its mask",
    "Positions that do not begin at 0, or that the model itself counts": "number the tokens|counts positions",
    "Attention masks that are not causal": "is not causal|not causal with one window",
    "Not a decoder-only language model": "encoder-decoder|cross-attention|language-model head|no input_ids",
    "An argument of attention that memory workers do not support": "to its attention|scales its scores",
}  # fmt: skip
OTHER = "Other reasons"


class Result(NamedTuple):
    """The outcome of one family. ``why``: of a refusal, or what differs. ``silent``: parts that no logit depends on."""

    name: str
    verdict: str
    why: str = ""
    silent: list[str] = []  # noqa: RUF012 - it is never changed


def run_family(name: str) -> Result:
    """Compare one family, in this process."""
    from model_table.tiny_models import POSITIONS, build

    import lamina
    from lamina import LLM, SamplingParams

    try:
        model, expected, failure = build(name), [], ""
        vocab = model.config.get_text_config(decoder=True).vocab_size
    except Exception as error:  # noqa: BLE001 - of transformers' own code
        return Result(name, NOT_BUILT, one_line(error))
    try:
        expected = [reference(model, prompt) for prompt in prompts(vocab)]
    except Exception as error:  # noqa: BLE001 - of transformers' own code, such as a model that needs an image
        failure = one_line(error)
    folder = tempfile.mkdtemp(prefix="families-")
    try:
        model.save_pretrained(folder)
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        with LLM(folder, transport="loopback", max_model_len=POSITIONS) as llm:
            if failure:
                return Result(name, NOT_BUILT, failure)
            outputs = llm.generate(prompts(vocab), params)
        wrong = difference(expected, [output.outputs[0].token_ids for output in outputs], "LLM")
        silent = silent_parts(model, prompts(vocab)[1])
        model = build(name, seed=1)
        expected = [reference(model, prompt) for prompt in prompts(vocab, seed=1)]
        with lamina.wrap(model, transport="loopback", max_model_len=POSITIONS) as split:
            got = padded(split, prompts(vocab, seed=1))
        wrong = wrong or difference(expected, got, "wrap")
        return Result(name, WRONG if wrong else SAME, wrong, silent)
    except ValueError as error:
        return Result(name, REFUSED, one_line(error).replace(folder, "DIRECTORY"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prompts(vocab: int, seed: int = 0) -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(5 + seed)
    return [torch.randint(3, min(vocab, 320), (n,), generator=draw).tolist() for n in PROMPTS]


def reference(model: Any, prompt: list[int]) -> list[tuple[int, float]]:
    """Return the greedy tokens of transformers, and the difference of the two best logits of each."""
    import torch

    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
        return_dict_in_generate=True, output_logits=True, use_cache=model.config.model_type not in UNCACHED,
    )  # fmt: skip
    best = [logits[0].float().topk(2).values.tolist() for logits in out.logits]
    tokens = out.sequences[0, len(prompt) :].tolist()
    return [(token, first - second) for token, (first, second) in zip(tokens, best, strict=True)]


def padded(split: Any, texts: list[list[int]]) -> list[list[int]]:
    import torch

    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(t)) + t for t in texts])
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in texts])
    out = split.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [row[longest:].tolist() for row in out]


def difference(expected: list[list[tuple[int, float]]], got: list[list[int]], what: str) -> str:
    """Return text on the first token that differs where it is no tie; "" if there is none."""
    for prompt, (want, have) in enumerate(zip(expected, got, strict=True)):
        for place, ((token, margin), own) in enumerate(zip(want, have, strict=True)):
            if own != token:
                if margin >= TIE:
                    return f"{what}: token {place} of prompt {prompt} is {own}, not {token} (margin {margin:.1e})"
                break
    return ""


def silent_parts(model: Any, prompt: list[int]) -> list[str]:
    """Return the weights of the text model that change no logit if they are zero in all layers: what this model cannot
    show to be right.
    """
    import torch

    ids = torch.tensor([prompt])
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    parts: dict[str, list[Any]] = {}
    for name, weight in decoder.named_parameters():
        parts.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(weight)

    def logits() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits

    whole, silent = logits(), []
    for name, weights in parts.items():
        kept = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        if torch.allclose(logits(), whole, rtol=0, atol=1e-6):
            silent.append(name)
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    return silent


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:400]


def in_own_process(name: str, run: Callable[[str], Result] = run_family, cpu_s: int = CPU_LIMIT_S) -> Result:
    """Return the result of a forked process, which is killed after ``cpu_s`` seconds of CPU time, or ``LIMIT_S``."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            with os.fdopen(writing, "w") as out:
                try:
                    result = run(name)
                except BaseException as error:  # noqa: BLE001 - only refusals are expected
                    result = Result(name, WRONG, one_line(error))
                out.write(json.dumps(result._asdict()))
        finally:
            os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    with os.fdopen(reading) as out:
        text = out.read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.waitpid(child, 0)
    return Result(**json.loads(text)) if text else Result(name, WRONG, f"no result in {cpu_s} s of CPU, or a crash")


def reason(why: str) -> str:
    return next((kind for kind, words in REASONS.items() if re.search(words, why)), OTHER)


def page(results: Iterable[Result], kinds: Iterable[str]) -> str:
    """Return docs/families.md. ``kinds``: all families; those without a result are listed too."""
    import torch
    import transformers

    of: dict[str, list[Result]] = {}
    known = {result.name: result for result in results}
    for name in sorted(kinds):
        result = known.get(name) or Result(name, NOT_RUN)
        of.setdefault(result.verdict, []).append(result)
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    counts = {verdict: len(of.get(verdict, ())) for verdict in VERDICTS}
    text = [
        "# Model families\n",
        "Look up whether a model of `transformers` runs on Lamina. A program makes this page:",
        "`tests/model_table/make_table.py --write`.\n",
        "The program builds a tiny model with random weights for each causal language model, and for the text part",
        "of each image-text model. It compares greedy tokens of `LLM` and `wrap` with those of transformers, in fp32.",
        'The lists have values of `model_type`; a word after a colon names a variant of the configuration. "Not built"',
        'means that transformers could not build a tiny model, "not run" that the program has not tried a model yet.\n',
        f"Models with {versions}: {', '.join(f'{number} {words}' for words, number in counts.items())}.\n",
        "## The same tokens\n",
        names(of.get(SAME, [])),
        "## Refused\n",
    ]
    for kind in (*REASONS, OTHER):
        if found := [r for r in of.get(REFUSED, []) if reason(r.why) == kind]:
            text += [f"{kind}:\n", names(found)]
    for verdict in (WRONG, NOT_BUILT, NOT_RUN):
        if counts[verdict]:
            text += [f"## {verdict.capitalize()}\n", names(of[verdict])]
    return "\n".join(text)


def read_page(text: str) -> dict[str, str]:
    """Return what docs/families.md says of each family: the heading that it is under, or the reason of a refusal."""
    found: dict[str, str] = {}
    titled = r"(?:^## (?!Refused)|\n\n)([^\n]+?):?\n\n```\n(.*?)```"
    for title, listed in re.findall(titled, text, re.DOTALL | re.MULTILINE):
        found |= dict.fromkeys(" ".join(listed.split()).split(", "), title.removeprefix("## "))
    return found


def names(results: Iterable[Result]) -> str:
    import textwrap

    return "```\n" + "\n".join(textwrap.wrap(", ".join(r.name for r in results), 140)) + "\n```\n"


def read_results(file: Path) -> dict[str, Result]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {r.name: r for r in (Result(**json.loads(line)) for line in lines)}


def warm() -> None:
    """Import everything before forks, in one thread; much is only imported when a model is cut."""
    os.environ["LAMINA_CACHE"] = ""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from model_table.tiny_models import POSITIONS, build
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: F401

    import lamina.api.wrapped
    import lamina.executor.worker_executor
    import lamina.models.load
    import lamina.workers.compute.main
    import lamina.workers.memory.main  # noqa: F401
    from lamina.models.convert import convert_model

    model = build("llama")
    reference(model, [3, 4, 5])
    convert_model(model, max_model_len=POSITIONS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families; default: all")
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    parser.add_argument("--results", type=Path, help="a file of results; without names those in it are not run")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    warm()
    from model_table.tiny_models import all_kinds

    file = args.results or (None if args.names else RESULTS)
    known = read_results(file) if file else {}
    for name in args.names or [n for n in all_kinds() if n not in known]:
        began = time.monotonic()
        known[name] = result = in_own_process(name)
        sys.stdout.write(
            f"{name}: {result.verdict} {result.why} {result.silent or ''} {time.monotonic() - began:.0f} s\n"
        )
        sys.stdout.flush()
        if file:
            file.parent.mkdir(exist_ok=True)
            with open(file, "a") as out:
                out.write(json.dumps(result._asdict()) + "\n")
    if args.write:
        PAGE.write_text(page(known.values(), all_kinds()))
    return any(result.verdict == WRONG for result in known.values())


if __name__ == "__main__":
    sys.exit(main())
