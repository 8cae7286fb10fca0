"""Hugging Face models: loading, routing of attention, and what is special in some families."""
