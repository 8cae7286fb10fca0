"""A body that has been read: the meaning of its fields, and refusals that name them."""
