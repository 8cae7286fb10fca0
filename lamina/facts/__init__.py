"""What a deployment would do, computed instead of measured. No torch here; every number says that it is modelled."""
