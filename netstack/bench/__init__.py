"""``python -m lamina.netstack bench``: what a message costs."""

from .command import main

__all__ = ["main"]
