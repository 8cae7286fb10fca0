"""Timelines of a run: the spans that each process records, merged into one, and their analysis."""
