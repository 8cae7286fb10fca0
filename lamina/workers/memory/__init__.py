"""The memory worker: holds a part of the KV cache and computes attention over it."""
