"""The prefill worker: a compute worker for prompts that attends by itself."""
