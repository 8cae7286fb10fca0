"""The exception of this package."""

from __future__ import annotations


class ConversionError(ValueError):
    """The model cannot be cut into slices that compute the same; the text names the operator and the reason."""
