"""Transports that need only the host: shared memory, TCP, the memory of one process."""
