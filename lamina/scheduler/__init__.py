"""Policy of the driver: which sequences run, where their KV lies, who computes prompts. No torch, no I/O."""
