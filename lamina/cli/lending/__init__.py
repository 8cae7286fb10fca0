"""Sub-commands of memory that deployments lend each other."""
