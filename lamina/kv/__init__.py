"""Where the KV cache lives: the tensors of a memory worker's pool, and the forms that it stores K and V in."""
