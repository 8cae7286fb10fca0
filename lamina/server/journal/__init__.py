"""Accepted requests on disk, which survive the server's process."""
