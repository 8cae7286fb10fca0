"""Memory that one deployment lends to another: leases, a ledger of debts, and their settlement. Pure policy."""
