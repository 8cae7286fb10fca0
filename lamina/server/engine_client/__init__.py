"""The engine's process, and the server's client for it."""
