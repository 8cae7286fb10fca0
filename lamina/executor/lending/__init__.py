"""Loans between deployments as processes: the ledger's service, a creditor's, and how an engine borrows."""
