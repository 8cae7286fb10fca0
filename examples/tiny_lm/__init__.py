"""The demo's language model: its corpus, its training and its evaluation."""
