"""Random JSON schemas on real workers, with preemptions and kills: what the texts are, by other libraries.

python perf/schema_runs.py [--count 10000] [--kills 20] [--seed 0]

Text that ends must be accepted by jsonschema. Text cut by max_tokens must be a beginning that xgrammar accepts, and
values of hypothesis-jsonschema must pass the masks; both are left out, by name, where they cannot be imported.
hypothesis-jsonschema 0.23.1 fails with the newest hypothesis: put both and xgrammar into a folder of PYTHONPATH.

    pip install --no-deps --target FOLDER xgrammar==0.2.9 apache-tvm-ffi
    pip install --no-deps --target FOLDER hypothesis-jsonschema==0.23.1 hypothesis==6.140.0

Prints counts as JSON; exit status 1 if any text or value is wrong.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import re
import signal
import sys
import time
import warnings
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import jsonschema

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from random_schemas import Made, dumped, root_schema  # noqa: E402

from lamina import LLM, SamplingParams, StructuredOutputsParams  # noqa: E402
from lamina.grammar.compiler import GrammarCompiler, source_of  # noqa: E402
from lamina.grammar.vocabulary import vocabulary_of  # noqa: E402

MODEL = str(ROOT / "examples" / "tiny_lm" / "model")
BATCH, MAX_TOKENS, PROMPT = 200, 60, "import json\n"
FORMATS = jsonschema.FormatChecker()
MINUS_ZERO = re.compile(r"(?<=[\s:,\[])-0(?=[\s,\]}]|$)")
SHOWN = 5  # wrong ones that are printed


class Oracles:
    """The libraries that judge; None for those that are not here."""

    def __init__(self, llm: LLM) -> None:
        info = llm.engine.worker_info
        self.vocabulary = vocabulary_of(llm.tokenizer, info.vocab_size, info.eos_token_ids)
        self.compiler, self.tokenizer = GrammarCompiler(self.vocabulary), llm.tokenizer
        self.xgrammar: Any = None
        if importlib.util.find_spec("xgrammar"):
            import xgrammar

            texts = [token.decode(errors="replace") for token in self.vocabulary.tokens]
            info = xgrammar.TokenizerInfo(texts, stop_token_ids=list(self.vocabulary.end_token_ids))
            self.xgrammar, self._xgrammar = xgrammar.GrammarCompiler(info), xgrammar
        self.from_schema: Any = None
        if importlib.util.find_spec("hypothesis_jsonschema"):
            from hypothesis_jsonschema import from_schema

            self.from_schema = from_schema

    def begins(self, schema: dict[str, Any], text: str) -> bool:
        """Returns whether xgrammar takes the text as a beginning."""
        compiled = self.xgrammar.compile_json_schema(json.dumps(without_bounds(schema)), any_whitespace=True)
        text = MINUS_ZERO.sub("0", text)  # xgrammar takes -0 for no integer
        return bool(
            self._xgrammar.GrammarMatcher(compiled).accept_string(text.rstrip("\ufffd"))
        )  # a part of a character

    def passes(self, schema: dict[str, Any], value: Any) -> bool:
        """Returns whether a value passes the masks, to its end."""
        matcher = self.compiler.compile(source_of(StructuredOutputsParams(json=schema)))
        tokens = self.tokenizer.encode(written(value), add_special_tokens=False)
        return bool(matcher.consume_tokens(tokens)) and matcher.is_accepting()

    def values(self, schema: dict[str, Any], seed: int) -> list[Any]:
        """Returns values that hypothesis-jsonschema makes, with properties in the schema's order."""
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as seeded
        from hypothesis.errors import Unsatisfiable

        made: list[Any] = []
        options = settings(
            max_examples=3, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
        )

        @seeded(seed)
        @options
        @given(self.from_schema(copy.deepcopy(schema)))  # it changes what it gets
        def collect(value: Any) -> None:
            made.append(value)

        with warnings.catch_warnings(), suppress(Unsatisfiable):  # where it finds no value, and says so
            warnings.simplefilter("ignore")
            collect()
        check = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)  # it knows no prefixItems
        return [ordered(value, schema, schema) for value in made if check.is_valid(value)]


def written(value: Any) -> str:
    """Returns JSON in the library's spelling: in a number that has bounds no exponent and no zeros at the end, and the
    character DEL escaped.
    """
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}".removesuffix(".0")
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(name)}: {written(one)}" for name, one in value.items()) + "}"
    return dumped(value).replace("\x7f", "\\u007f")


def without_bounds(schema: Any) -> Any:
    """Returns a schema without what xgrammar takes in one spelling only: fractions and texts with bounds, and listed
    values that are objects or have escapes.
    """
    if isinstance(schema, list):
        return [without_bounds(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    bounds = {"number": ["minimum", "maximum"], "string": ["minLength", "maxLength"]}
    kind = schema.get("type")
    left_out = [*bounds.get(kind, ())] if isinstance(kind, str) else []
    listed = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    if any(isinstance(one, dict) or (isinstance(one, str) and "\\" in dumped(one)) for one in listed):
        left_out += ["enum", "const"]
    return {name: without_bounds(value) for name, value in schema.items() if name not in left_out}


def ordered(value: Any, schema: Any, root: dict[str, Any]) -> Any:
    """Returns a value with its properties in the schema's order, which the grammar keeps to."""
    if not isinstance(schema, dict):
        return value
    if "$ref" in schema:
        return ordered(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for way in schema.get("anyOf", ()):
        if jsonschema.Draft202012Validator({**way, "$defs": root.get("$defs", {})}).is_valid(value):
            return ordered(value, way, root)
    if isinstance(value, dict) and "properties" in schema:
        names = [*schema["properties"], *(name for name in value if name not in schema["properties"])]
        return {name: ordered(value[name], schema["properties"].get(name), root) for name in names if name in value}
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        parts = [*first, *[schema.get("items")] * (len(value) - len(first))]
        return [ordered(one, part, root) for one, part in zip(value, parts, strict=False)]
    return value


def judged(oracles: Oracles, seed: int, made: Made, text: str, reason: str, counts: dict[str, int]) -> str:
    """Counts one completion and its values. Returns what is wrong; "" if nothing is."""
    if reason == "stop":
        counts["ended"] += 1
        try:
            jsonschema.Draft202012Validator(made.schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as e:
            return f"{seed}: jsonschema refuses {text!r}: {str(e).splitlines()[0]}"
    elif reason == "length":
        counts["cut"] += 1
        if oracles.xgrammar is not None:
            counts["beginnings judged"] += 1
            if not oracles.begins(made.schema, text):
                return f"{seed}: xgrammar refuses the beginning {text!r} of {made.schema}"
    else:
        return f"{seed}: ended by {reason}: {text!r}"
    values = [made.value(Random(seed))] + (oracles.values(made.schema, seed) if oracles.from_schema else [])
    for value in values:
        counts["values"] += 1
        if not oracles.passes(made.schema, value):
            return f"{seed}: the masks refuse {written(value)!r} of {made.schema}"
    return ""


def run_batch(llm: LLM, seeds: range, kills: list[int], counts: dict[str, int]) -> list[tuple[int, str, str]]:
    """Returns the seed, text and reason of each schema. ``kills``: outputs after which a worker is killed."""
    made = [root_schema(seed) for seed in seeds]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, seed=seed, structured_outputs=StructuredOutputsParams(json=one.schema))
        for seed, one in zip(seeds, made, strict=True)
    ]
    found, count = dict[str, tuple[str, str]](), 0
    with llm.stream([PROMPT] * len(made), params) as stream:
        ids = stream.request_ids
        for output in stream:
            count += 1
            if count in kills:
                counts["kills"] += 1
                names = sorted(llm.pools.pids)
                os.kill(llm.pools.pids[names[count % len(names)]], signal.SIGKILL)
            if output.finished:
                found[output.request_id] = (output.outputs[0].text, str(output.outputs[0].finish_reason))
    return [(seed, *found[number]) for seed, number in zip(seeds, ids, strict=True)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first schema")
    asked = parser.parse_args(words)
    counts = dict.fromkeys(("schemas", "ended", "cut", "beginnings judged", "values", "kills"), 0)
    wrong, began = list[str](), time.monotonic()
    every = max(1, asked.count // BATCH // max(1, asked.kills))
    options = {"kv_memory": "1MiB", "max_num_seqs": 32, "max_model_len": 256, "max_recoveries": 2 * asked.kills}
    with LLM(MODEL, dtype="float32", memory_workers=2, **options) as llm:
        oracles = Oracles(llm)
        for number, first in enumerate(range(asked.seed, asked.seed + asked.count, BATCH)):
            seeds = range(first, min(first + BATCH, asked.seed + asked.count))
            kills = [300 + 37 * number % 500] if number % every == 0 and counts["kills"] < asked.kills else []
            answers = run_batch(llm, seeds, kills, counts)
            for seed, text, reason in answers:
                counts["schemas"] += 1
                if error := judged(oracles, seed, root_schema(seed), text, reason, counts):
                    wrong.append(error)
            print(f"{counts['schemas']} schemas, {len(wrong)} wrong", file=sys.stderr, flush=True)
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    missing = [
        name
        for name, there in (("xgrammar", oracles.xgrammar), ("hypothesis-jsonschema", oracles.from_schema))
        if not there
    ]
    preemptions = int(metrics["vllm:num_preemptions"])
    print(json.dumps({**counts, "preemptions": preemptions, "wrong": len(wrong), "not here": missing,
                      "seconds": round(time.monotonic() - began, 1)}))  # fmt: skip
    for error in wrong[:SHOWN]:
        print(error, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
