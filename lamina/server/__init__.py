"""An OpenAI-compatible HTTP server: JSON here, the engine in a process of its own."""
