"""The KV blocks that sequences hold: counts and ids. The driver and memory workers compute the same."""
