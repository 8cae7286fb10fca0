"""Small helpers that do not depend on engines: processes, cores, threads, tensors over bytes."""
