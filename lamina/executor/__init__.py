"""The executor: it starts the workers of an engine, connects them and watches them."""
