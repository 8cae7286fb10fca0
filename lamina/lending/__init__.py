"""Lending of memory between deployments: leases, a ledger of debts, and their settlement. Pure policy."""
