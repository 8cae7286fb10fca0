"""Hugging Face models: loading, routing of attention, wrapping."""
