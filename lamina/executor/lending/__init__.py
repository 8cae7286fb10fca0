"""Processes of lending between deployments: the ledger's service, a creditor's, and how an engine borrows."""
