"""The public Python interface: LLM, AsyncLLM, wrap."""
