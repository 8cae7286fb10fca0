"""Pages on their way between a memory worker's pool and the medium beside it."""
