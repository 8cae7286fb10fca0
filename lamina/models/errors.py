"""Errors of a model that a user requested."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be loaded. The text is one line that names the argument and the fix."""


class UnsupportedModelError(ModelError):
    """A model whose attention cannot be served exactly. The text is one line that names the layer and the reason."""
