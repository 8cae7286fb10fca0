"""Replies in the formats that clients read."""
