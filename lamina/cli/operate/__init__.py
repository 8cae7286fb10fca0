"""Requests of an operator to a running server, and to the KV that one has stored."""
