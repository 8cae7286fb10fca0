"""The engine in a world of its own: one virtual clock, workers that fail when they are told to, a model of integers."""
