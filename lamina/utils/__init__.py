"""Small helpers that know nothing of engines: processes, cores, threads, tensors over bytes."""
