"""The transport ``cuda``: kernels that put into the memory of another GPU, or of another process's."""
