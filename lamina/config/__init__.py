"""The options of an engine, each declared once, and which of them go together."""
