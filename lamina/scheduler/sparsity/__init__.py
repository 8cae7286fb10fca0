"""Sequences that keep or attend a part of their KV, and the error that this costs. Pure policy."""
