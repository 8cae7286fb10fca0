"""KV that a memory worker receives from other workers: reshards, migrations, rebuilds, prefill."""
