"""``--pipeline auto``: measures both pools at the start, and chooses the number of batches."""
