"""Errors of ``LLM`` in a Python user's words: keywords, such as ``kv_budget=512``, instead of flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lamina.config.flag_groups import GROUPS, ModeFlag, flag_name
from lamina.config.flat_options import OPTIONS
from lamina.config.option import MEASURED
from lamina.netstack.schemes import SCHEMES

from .vllm_compat import PASTED

_OF_KEYS = {group.spelling(target): target.partition(".")[0] for group in GROUPS for target in group.keys.values()}
_OF_MODES = {
    f"{group.flag} {mode}:{key}=": group.keys[key].partition(".")[0]
    for group in GROUPS
    if isinstance(group, ModeFlag)
    for mode, keys in group.modes.items()
    for key in keys
}
# Flag, or flag and key -> keyword. The first option of a flag has its number; `auto` of --pipeline is `plan`.
_KEYWORDS = {
    **{flag_name(name): name for name in reversed(OPTIONS)},
    **{flag: name for flag, name in (_OF_KEYS | _OF_MODES).items() if name in OPTIONS},
    **{"--" + name.replace("_", "-"): name for name in PASTED},
}
_WORDS = {*SCHEMES, "cpu", MEASURED, *(word for option in OPTIONS.values() for word in option.choices.names if word)}
_VALUE = rf"\d(?:[\w.]*\w)?|(?:auto|cuda)(?::\w+)?|{'|'.join(map(re.escape, sorted(_WORDS)))}"
_NUMBER = re.compile(r"\d+(\.\d+)?")
_FLAG = re.compile(
    rf"(?P<flag>{'|'.join(map(re.escape, sorted(_KEYWORDS, key=len, reverse=True)))}|--no-[a-z-]+)"
    rf"(?:(?<==)|(?![\w-])[ =]?)(?:(?P<value>{_VALUE})(?![\w-]))?"
)


@contextmanager
def keyword_errors() -> Iterator[None]:
    """A context in which a ValueError names keywords instead of flags."""
    try:
        yield
    except ValueError as error:
        error.args = (keyword_text(str(error)), *error.args[1:])
        raise


def keyword_text(text: str) -> str:
    """Return ``text`` with a keyword for each flag of an option, and with its value, if one follows, as in Python."""
    return _FLAG.sub(_keyword, text)


def _keyword(match: re.Match[str]) -> str:
    flag, value = match["flag"], match["value"]
    if flag not in _KEYWORDS:
        name = flag.removeprefix("--no-").replace("-", "_")
        return f"{name}=False" if name in OPTIONS else match[0]
    name = "plan" if flag == "--pipeline" and (value or "").startswith("auto") else _KEYWORDS[flag]
    if value is None:
        following = match.string[match.end() : match.end() + 1]
        has_value = flag.endswith("=") and following not in ("", *" :,;)")
        return name + "=" * has_value + " " * match[0].endswith(" ")
    return f"{name}={value}" if _NUMBER.fullmatch(value) else f'{name}="{value}"'
