"""What vLLM's own tests use besides a server and an LLM, over Lamina."""
