"""Checks of a request before its fields are read: keys, hosts and limits."""
