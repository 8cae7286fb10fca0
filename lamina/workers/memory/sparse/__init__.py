"""A step's work for KV sparsity: scores of attended blocks, and rows that attend their best blocks alone."""
