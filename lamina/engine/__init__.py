"""The engine: schedule, run, take."""
