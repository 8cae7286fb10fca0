"""KV that comes to a memory worker from other workers: moves, copies, rebuilds, prefill."""
