"""The whole fleet in one process: the shipped driver and workers, each thread in its turn, on the virtual clock."""
