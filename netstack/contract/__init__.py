"""The contract of all transports: the seam, the common part of channels and fabrics, the cluster's key."""
