"""Accepted requests on disk: they live longer than the server's process."""
