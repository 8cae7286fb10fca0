"""Compiles structured outputs by llguidance. No torch here.

llguidance refuses what it cannot enforce, and names it; its limits bound the time and memory of each call. It needs no
other package. xgrammar, the alternative, brings triton and ignores some keywords without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lamina.protocol.control import Vocabulary
from lamina.request.structured_outputs import StructuredOutputsParams

from .lark import Specials
from .structural_tag import rules_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Where a text leaves no choice, the library would allow just one division into tokens, not the model's own.
_ANY_TOKENS = '%llguidance {"no_forcing": true}'
_NONE: Specials = MappingProxyType({})
# They bound a mask's time by counts, not by a clock: ranks of one sequence must come to the same mask. Other requests
# of a step wait for it.
_LIMITS: Mapping[str, int] = MappingProxyType({"step_lexer_fuel": 100_000})
MAX_INDENTATION = 32  # spaces or tabs after a line break
# Between two parts of JSON: as printers of JSON write it. A small model would repeat whitespace to the bound.
_SPACES = rf"([ \t]|\r?\n[ \t]{{0,{MAX_INDENTATION}}})?"


class GrammarError(ValueError):
    """A grammar that cannot be enforced; the text names the reason."""


class _Tokens:
    """The vocabulary in the form that llguidance takes."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special_token_ids
        self.eos_token_id = vocabulary.end_token_ids[0]
        self.made: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Return tokens of a text that the grammar leaves no choice about: the longest ones, from left to right."""
        return [] if self.made is None else self.made.greedy_tokenize(text)


def source_of(params: StructuredOutputsParams, specials: Specials = _NONE) -> str:
    """Return structured outputs as llguidance reads them. ``specials``: of the vocabulary. Raises GrammarError."""
    try:
        own = _own_source(params, specials)
    except ValueError as e:
        raise GrammarError(f"structured_outputs: {_line(str(e))}") from e
    first = json.loads(own)["grammars"][0] if own.startswith('{"grammars"') else {"lark_grammar": own}
    ways = ["before @structure" if params.before else "@structure"]
    if params.instead:
        ways.append("lead calls" if params.before else "calls")
    main = f"{_ANY_TOKENS}\nstart: {' | '.join(ways)}\n{params.before}{params.instead}"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, {**first, "name": "structure"}]})


def _own_source(params: StructuredOutputsParams, specials: Specials) -> str:
    from llguidance import LLMatcher, grammar_from

    if params.structural_tag is not None:
        return rules_of(json.loads(str(params.structural_tag)), specials, _json_options(params), _expression_of)
    if params.json is not None or params.json_object:
        return str(LLMatcher.grammar_from_json_schema(_schema_of(params), overrides=_json_options(params)))
    if params.regex is not None:
        return f"start: /{_expression_of(params.regex)}/"
    if params.choice is not None:
        return f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(text) for text in params.choice)}"  # thousands, too
    return str(grammar_from("grammar", params.grammar or ""))


def _schema_of(params: StructuredOutputsParams) -> Any:
    return json.loads(params.json) if isinstance(params.json, str) else {"type": "object"}


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    spaces = {"whitespace_pattern": _SPACES}
    return {**({"whitespace_flexible": False} if params.disable_any_whitespace else spaces), "lenient": False}


def _expression_of(regex: str) -> str:
    from llguidance import regex_to_lark

    return str(regex_to_lark(_without_anchors(regex), "d"))  # digits are those of ASCII


class GrammarCompiler:
    """Makes matchers of grammars for one vocabulary. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        words = _Tokens(vocabulary)
        tokens: Any = words
        self._tokenizer = words.made = LLTokenizer(tokens, eos_token=vocabulary.end_token_ids[0])
        self._limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        self.specials = {
            vocabulary.tokens[token][1:].decode(errors="replace"): token for token in vocabulary.special_token_ids
        }  # text of each special token, without its mark -> its id

    def compile(self, source: str) -> LLMatcher:
        """Return a matcher at the beginning of a text. Raises GrammarError for a grammar that is wrong, that no text
        follows, or that takes too much.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not any(mask) and not matcher.is_error():
                raise GrammarError("structured_outputs: no text follows this grammar")
        if matcher.is_error():
            raise GrammarError(f"structured_outputs: {_reason(matcher.get_error())}")
        return matcher


def _without_anchors(regex: str) -> str:
    """Return the expression without ^ at its beginning and $ at its end: it matches whole texts in any case."""
    regex = regex.removeprefix("^")
    if regex.endswith("$"):
        num_backslashes = len(regex) - 1 - len(regex[:-1].rstrip("\\"))
        regex = regex if num_backslashes % 2 else regex[:-1]
    return regex


def _reason(error: str) -> str:
    first = error.split("<non-verbose/>")[0].strip()
    words = {"NoExtensionBias": "no text follows this grammar", "NoExtension": "no text follows this grammar"}
    return words.get(first, _line(first)) or "it cannot be compiled"


def _line(text: str, most: int = 300) -> str:
    return " ".join(text.split())[:most]
