"""Transports by the host's own means: shared memory, TCP, the memory of one process."""
