"""Models of deployments, computed instead of measured. No torch here; every number is labelled as modelled."""
