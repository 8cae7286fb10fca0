"""Calls of Granite 4: those of Hermes, in a template of its own."""

from __future__ import annotations

from .hermes import begins as begins
from .hermes import open_parser as open_parser

MARKS = ("<tool_call>", "<|start_of_role|>")
SPECIAL = False
