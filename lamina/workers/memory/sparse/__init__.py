"""What sparse KV asks of a step: scores of what rows attend, and rows that attend their best blocks alone."""
