"""Instances that lend each other memory, and their ledger, on a virtual clock over a network that fails."""
