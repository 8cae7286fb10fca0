"""Transfers of pages between a memory worker's pool and a storage backend."""
