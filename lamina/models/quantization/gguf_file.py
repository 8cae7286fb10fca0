"""GGUF files: a configuration, a tokenizer and blocks of weights in one file, or in parts that are named alike.

No other file of their folder is read.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.model_files import one_line
from lamina.utils.install_command import install_command

SUFFIX, MAGIC = ".gguf", b"GGUF"
MAX_ENTRIES = 1 << 16  # fields, and tensors
MAX_ITEMS = 1 << 22  # of all arrays together; a vocabulary has 300,000
MAX_DIMS, MAX_NUMBERS = 4, 1 << 48  # of a tensor
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a value, by its type
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
MAX_PARTS = 1000


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, by its suffix."""
    return path.suffix == SUFFIX and not path.is_dir()


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model of which ``path`` is the first: itself, or all parts by the numbers in their names.
    Raises ModelError.
    """
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 0 < count <= MAX_PARTS:
        raise UnsupportedModelError(f"{path} is one of {count} parts: 1 to {MAX_PARTS} are read")
    parts = [path.with_stem(f"{match['name']}-{number:05}-of-{count:05}") for number in range(1, count + 1)]
    if path != parts[0]:
        raise ModelError(f"{path} is a part of a GGUF file: give the first one, {parts[0]}")
    if missing := next((part for part in parts if not part.is_file()), None):
        raise ModelError(f"{missing} is missing: put all {count} parts into one folder")
    return parts


def check_file(path: Path) -> None:
    """Raise ModelError unless the counts and sizes in the headers of the file's parts are those of files that can be,
    and the package gguf is there. It takes them as they are, and would make lists without end. Imports nothing large.
    """
    for part in parts_of(path) if path.is_file() else [path]:
        _check_part(part)
    if find_spec("gguf") is None:
        raise ModelError(f"{path} is GGUF, which needs the package gguf: {install_command('gguf')}")


def _check_part(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC))
        state = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if head != MAGIC:
        raise ModelError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    _check_header(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=4)
def _check_header(path: Path, stamp: tuple[int, int, int]) -> None:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is truncated or corrupt, fetch it again: {one_line(error)}") from error


class _Header:
    """Reads a header once, and keeps nothing."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._num_items = data, len(MAGIC), 0

    def check(self) -> None:
        """Raise ValueError or struct.error for a header that lies."""
        if self._number("<I") not in (2, 3):
            raise ValueError("its version is not 2 or 3, in little endian")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        if max(num_tensors, num_fields) > MAX_ENTRIES:
            raise ValueError(f"it has {num_tensors} tensors and {num_fields} fields: at most {MAX_ENTRIES} are read")
        for _ in range(num_fields):
            self._skip(self._number("<Q"))
            self._skip_value(self._number("<I"))
        for _ in range(num_tensors):
            self._check_tensor()

    def _check_tensor(self) -> None:
        self._skip(self._number("<Q"))
        num_dims = self._number("<I")
        if not 0 < num_dims <= MAX_DIMS:
            raise ValueError(f"a tensor has {num_dims} dimensions: 1 to {MAX_DIMS} are read")
        shape = [self._number("<Q") for _ in range(num_dims)]
        if not 0 < math.prod(shape) <= MAX_NUMBERS:
            raise ValueError(f"a tensor is {shape}")
        self._number("<I")
        if (offset := self._number("<Q")) > len(self._data):
            raise ValueError(f"a tensor is at byte {offset}, beyond the file")

    def _skip_value(self, kind: int) -> None:
        if kind == _ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            self._num_items += count
            if self._num_items > MAX_ITEMS:
                raise ValueError(f"its arrays have {self._num_items} values: at most {MAX_ITEMS} are read")
            if kind != _STRING:
                self._skip(count * self._bytes_of(kind))
                return
            for _ in range(count):
                self._skip(self._number("<Q"))
        elif kind == _STRING:
            self._skip(self._number("<Q"))
        else:
            self._skip(self._bytes_of(kind))

    def _bytes_of(self, kind: int) -> int:
        if kind not in _BYTES:
            raise ValueError(f"a value is of type {kind}")
        return _BYTES[kind]

    def _number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(number)

    def _skip(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, and a value at {self._at}")


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a file. Raises ModelError."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    check_file(path)
    try:
        architecture, vocabulary, settings = get_gguf_tokenizer(str(path))
        tokenizer, more = convert_gguf_tokenizer(architecture, vocabulary)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**settings, **more})
    except Exception as error:  # any class: the file is not trusted
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {one_line(error)}") from error
