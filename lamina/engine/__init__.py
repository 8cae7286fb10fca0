"""The engine: schedule, run, postprocess."""
