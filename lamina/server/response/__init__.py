"""Completions as clients read them."""
