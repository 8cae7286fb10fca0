"""Structured output: grammars as the front end checks them and as workers follow them, by llguidance."""
