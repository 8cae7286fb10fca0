"""Errors of a model that a user asked for."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be loaded. One line that names the argument and the fix."""


class UnsupportedModelError(ModelError):
    """A model whose attention cannot be served exactly. One line that names the layer and the reason."""
