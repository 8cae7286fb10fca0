"""A body that has been read: its fields, what they mean, and refusals that name them."""
