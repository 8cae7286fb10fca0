"""Cuts a captured model at an opaque operator into slices. Imports torch, but nothing else of lamina."""

if __name__ != "lamina.converter":
    raise ImportError("import lamina.converter, not the top-level folder converter/")

from .convert import convert
from .errors import ConversionError
from .fuse import fuse
from .graph import RowTensor
from .move import move
from .redirect import redirect
from .slices import Cut, CutCall, MixerCall, Send, Slice, SlicedProgram

__all__ = [
    "ConversionError",
    "Cut",
    "CutCall",
    "MixerCall",
    "RowTensor",
    "Send",
    "Slice",
    "SlicedProgram",
    "convert",
    "fuse",
    "move",
    "redirect",
]
