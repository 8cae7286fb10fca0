"""Layers that every connection and every request passes: limits, TLS, keys, hosts."""
