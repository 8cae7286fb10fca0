"""The memory worker: it holds the KV cache and attends over it."""
