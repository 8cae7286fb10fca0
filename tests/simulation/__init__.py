"""The engine in a world of its own: one virtual clock, workers that fail on demand, a model of integers."""
