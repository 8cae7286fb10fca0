"""Sessions: named conversations, their turns, and contexts that grow too long."""
