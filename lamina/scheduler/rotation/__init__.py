"""Rounds of the n batches: who runs when, how many batches there are, and which rounds are skipped."""
