"""Where the KV cache lives: tensors, block ids, partitions."""
