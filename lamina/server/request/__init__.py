"""Interprets the fields of a decoded body, and refuses wrong ones by name."""
